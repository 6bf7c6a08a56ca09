# SPDX-License-Identifier: Apache-2.0
"""Shards in TensorFlow checkpoints: slices of one table, never gathered.

TensorFlow's format stores slices of a tensor, so every rank writes a block
of rows or columns and a merge of the index makes them one table that plain
TensorFlow reads whole. Row-placed shards hold rows of all over the table, so
ranks first exchange rows, each keeping a contiguous block; that needs room
for a second copy of the shard while a checkpoint is written or read.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.distribute import tensorflow_internals as internals
from tfdist_ext.sharding import placement
from tfdist_ext.sharding.config import ShardSpec

if TYPE_CHECKING:
    from tfdist_ext.distribute.collectives import Collectives

_KEY = "VARIABLE_VALUE"


def attach(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a shard save and restore itself as a slice of its table."""
    shard = _SavedShard(variable, spec, collectives)
    variable._serialize_to_tensors = shard.serialize
    variable._restore_from_tensors = shard.restore
    variable._tfdist_collectives = collectives


class _SavedShard:
    """How one shard goes into a checkpoint and comes out of it."""

    def __init__(
        self, variable: tf.Variable, spec: ShardSpec, collectives: Collectives
    ) -> None:
        self._variable = variable
        self._spec = spec
        self._collectives = collectives

    @property
    def _whole(self) -> bool:
        # So few rows that some ranks would have an empty block.
        spec = self._spec
        by_row = spec.placement == "row"
        return by_row and spec.local_rows < spec.world_size

    def serialize(self) -> dict[str, Any]:
        """The slice this rank writes, computed when it is written."""
        spec = self._spec
        slice_spec = "" if self._whole else self._slice()
        make = self._gather if self._whole else self._block
        if spec.placement == "column":
            make = self._variable.read_value
        return {
            _KEY: {
                slice_spec: internals.SaveSpec(
                    tensor=make,
                    slice_spec=slice_spec,
                    name=_KEY,
                    dtype=self._variable.dtype,
                    device=self._variable.device,
                )
            }
        }

    def restore(self, restored: dict[str, Any]) -> tf.Operation:
        """Assigns this rank's part of what was read."""
        value = restored[_KEY]
        if isinstance(value, dict):
            (value,) = value.values()
        spec = self._spec
        if spec.placement == "row":
            value = self._pick(value) if self._whole else self._spread(value)
        return self._variable.assign(value)

    def _slice(self) -> str:
        spec = self._spec
        if spec.placement == "column":
            first, end = spec.columns
            return f"{spec.rows} {spec.dim} 0,{spec.rows}:{first},{end - first}"
        first, end = self._rows()
        if self._variable.shape.rank == 1:
            return f"{spec.rows} {first},{end - first}"
        return f"{spec.rows} {spec.dim} {first},{end - first}:0,{spec.dim}"

    def _blocks(self) -> np.ndarray:
        """First block of rows (`id // world_size`) of every rank's part."""
        spec = self._spec
        ranks = np.arange(spec.world_size + 1)
        return ranks * spec.local_rows // spec.world_size

    def _rows(self) -> tuple[int, int]:
        spec = self._spec
        blocks = self._blocks()
        first = blocks[spec.rank] * spec.world_size
        end = blocks[spec.rank + 1] * spec.world_size
        return int(first), int(min(end, spec.rows))

    def _gather(self) -> tf.Tensor:
        from tfdist_ext.sharding import sharded_variable

        whole = sharded_variable.gather(self._variable, self._collectives)
        return tf.constant(whole)

    def _pick(self, whole: tf.Tensor) -> tf.Tensor:
        spec = self._spec
        ids = placement.ids_of_shard(spec.rank, spec.world_size, spec.rows)
        mine = tf.gather(whole, ids)
        blank = tf.zeros_like(self._variable)
        return tf.tensor_scatter_nd_update(
            blank, (ids // spec.world_size)[:, None], mine
        )

    def _block(self) -> tf.Tensor:
        """Contiguous rows of the table, put together from all ranks."""
        spec = self._spec
        blocks = self._blocks()
        parts, _ = self._collectives.all_to_all(
            tf.convert_to_tensor(self._variable),
            tf.constant(np.diff(blocks), tf.int64),
            f"{spec.table}/save",
        )
        first, end = self._rows()
        ids = np.arange(first, end)
        count = blocks[spec.rank + 1] - blocks[spec.rank]
        owner = placement.owner_of(ids, spec.world_size)
        block = ids // spec.world_size - blocks[spec.rank]
        return tf.gather(parts, owner * count + block)

    def _spread(self, rows: tf.Tensor) -> tf.Tensor:
        """This rank's shard, from the contiguous rows that ranks have read."""
        spec = self._spec
        first, end = self._rows()
        ids = np.arange(first, end)
        # To every owner in turn, its rows in ascending order.
        order = np.argsort(
            placement.owner_of(ids, spec.world_size), kind="stable"
        )
        counts = np.bincount(
            placement.owner_of(ids, spec.world_size),
            minlength=spec.world_size,
        )
        parts, _ = self._collectives.all_to_all(
            tf.gather(rows, order),
            tf.constant(counts, tf.int64),
            f"{spec.table}/restore",
        )
        missing = spec.local_rows - tf.shape(parts)[0]
        padding = [[0, missing]] + [[0, 0]] * (parts.shape.rank - 1)
        return tf.pad(parts, padding)


def merge_shards_of_all_ranks() -> None:
    """Lets savers write one checkpoint from the shards of all ranks.

    After this, `tf.train.Checkpoint.save` and `.write` of anything that
    holds shards must be called by all ranks; the directory must be shared
    by them. The path given on rank 0 counts. Dense variables are written by
    rank 0 only.
    """
    saver = internals.MultiDeviceSaver
    if not hasattr(saver.save, "_tfdist_original"):
        original = saver.save

        @functools.wraps(original)
        def save(self: Any, file_prefix: Any, options: Any = None) -> Any:
            collectives = _collectives_of(self)
            if collectives is None or not tf.executing_eagerly():
                return original(self, file_prefix, options)
            return _save_merged(
                self, original, file_prefix, options, collectives
            )

        save._tfdist_original = original  # type: ignore[attr-defined]
        saver.save = save


def _collectives_of(saver: Any) -> Any:
    for tensors in saver._shardable_tensors_by_task.values():
        for tensor in tensors:
            owner = getattr(tensor.trackable, "_value", tensor.trackable)
            if hasattr(owner, "_tfdist_collectives"):
                return owner._tfdist_collectives
    return None


def _save_merged(
    saver: Any,
    original: Any,
    file_prefix: Any,
    options: Any,
    collectives: Collectives,
) -> None:
    group = collectives.group
    prefix = _prefix_of_first_rank(file_prefix, collectives)
    parts = [f"{prefix}_ranks/{rank}" for rank in range(group.world_size)]
    failure = None
    try:
        tf.io.gfile.makedirs(f"{prefix}_ranks")
        if group.rank > 0:
            _keep_slices_only(saver)
        original(saver, tf.constant(parts[group.rank]), options)
    except tf.errors.OpError as error:
        failure = error
    _raise_everywhere(failure, prefix, collectives)
    if group.rank == 0:
        try:
            written = [p for p in parts if tf.io.gfile.exists(f"{p}.index")]
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=written,
                destination_prefix=prefix,
                delete_old_dirs=True,
            )
        except tf.errors.OpError as error:
            failure = error
    _raise_everywhere(failure, prefix, collectives)


def _keep_slices_only(saver: Any) -> None:
    by_task = saver._shardable_tensors_by_task
    for task, tensors in by_task.items():
        by_task[task] = [t for t in tensors if t.slice_spec]


def _prefix_of_first_rank(file_prefix: Any, collectives: Collectives) -> str:
    mine = tf.get_static_value(tf.convert_to_tensor(file_prefix))
    encoded = np.frombuffer(
        mine if collectives.group.rank == 0 else b"", np.uint8
    )
    prefix = collectives.all_gather(tf.constant(encoded), "checkpoint/prefix")
    return prefix.numpy().tobytes().decode()


def _raise_everywhere(
    failure: Exception | None, prefix: str, collectives: Collectives
) -> None:
    failed = tf.constant([failure is not None], tf.bool)
    flags = collectives.all_gather(
        tf.cast(failed, tf.int32), "checkpoint/status"
    ).numpy()
    if failure is not None:
        raise failure
    if flags.any():
        ranks = np.flatnonzero(flags).tolist()
        raise tf.errors.AbortedError(
            None,
            None,
            f"Checkpoint '{prefix}' was not written: it failed on rank(s) "
            f"{ranks}; see their output. Earlier checkpoints are intact.",
        )
