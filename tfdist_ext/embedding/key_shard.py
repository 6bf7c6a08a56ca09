# SPDX-License-Identifier: Apache-2.0
"""The buckets of a dynamic vocabulary that a rank owns.

Of B buckets, rank r of W owns the buckets from `n * B // W` up to
`(n + 1) * B // W`, where n is `(r - first_rank) % W`. The key in slot s of
bucket b has row `1 + s * B + b` of the table. A checkpoint therefore stores the
keys of all ranks as slices of one array `[B, slots]`, for any placement of the
table.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Mapping
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import checkpoint_slices
from tfdist_ext.embedding import initial_rows
from tfdist_ext.embedding import key_texts
from tfdist_ext.embedding.key_texts import CANDIDATES
from tfdist_ext.embedding.key_texts import ROWS
from tfdist_ext.embedding.key_texts import STEP
from tfdist_ext.embedding.key_texts import KeySlices
from tfdist_ext.embedding.key_texts import KeyTexts
from tfdist_ext.embedding.rows_of_keys import KeySteps
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.table_config import DynamicVocabulary
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Variable

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

_COUNTS = ("rows", "candidates", "admitted", "evicted", "expired", "step")


class KeyShard(tf.Module):
    """This rank's part of a dynamic vocabulary, saved with its table.

    All ranks must create one, and must call its methods that exchange.

    Args:
        spec: this rank's part of the table.
        config: the dynamic vocabulary.
        initializer: the table's Keras initializer.
        collectives: the strategy's collectives; None in one process.
        order: the index of the table in its layer. It determines the rank that
            owns the first buckets, so that tables with few buckets do not all
            use the same rank.

    Raises:
        ValueError: if keys may lose their rows and the initializer cannot make
            single rows.
    """

    def __init__(
        self,
        spec: ShardSpec,
        config: DynamicVocabulary,
        initializer: InitializerLike,
        collectives: Collectives | None,
        order: int = 0,
    ) -> None:
        super().__init__(name=f"keys_of_{_identifier(spec.table)}")
        self._spec = spec
        self.config = config
        self._collectives = collectives
        rank, world_size = 0, 1
        if collectives is not None:
            rank = collectives.group.rank
            world_size = collectives.group.world_size
            marks.set_collectives(self, collectives)
            marks.set_slicing(self, self._slice_in)
        first_rank = order % world_size
        self.slices = KeySlices(config, rank, world_size, first_rank)
        self._initial: tuple[str, float, float] | None = None
        if config.reuses_rows:
            self._initial = initial_rows.describe_rows(initializer, spec)
        with tf.init_scope():
            numbers = tf.constant(
                [
                    initial_rows.seed_of(initializer, spec.table),
                    *initial_rows.hash_key_of(initializer, spec.table),
                ],
                tf.int64,
            )
            if collectives is not None:
                numbers = collectives.initial_value(
                    numbers, f"{spec.table}/seed of rows"
                )
            self._seed, hash_key = numbers[0], numbers[1:]
            self.handle = vocabulary_ops.vocabulary(
                spec.table, config, hash_key, rank, world_size, first_rank
            )
        checkpoint_slices.save_by(self, self._saved, self._restore)
        self.steps = KeySteps()
        self._slots = _Slots()
        self._read_buckets = 0
        self._exported = _Exported()
        self.texts: KeyTexts | None = None
        if config.keep_text:
            self.texts = KeyTexts(
                spec.table, self.handle, self.slices, collectives
            )

    def attach(self, variable: Variable) -> None:
        """Marks a variable as the table of these keys.

        Args:
            variable: a TensorFlow variable, this rank's part of the table.
        """
        marks.set_keys(variable, self)
        strategy = getattr(variable, "distribute_strategy", None)
        if strategy is not None:
            for component in strategy.experimental_local_results(variable):
                marks.set_keys(component, self)
        self._restore_smaller(variable)

    def _restore_smaller(self, variable: Variable) -> None:
        if self._collectives is None:
            checkpoint_slices.attach_whole(variable, self._spec.table)
        elif marks.shard_spec(variable) is None:
            marks.set_grows(variable)

    def adopt_slot(self, slot: Variable, value: float) -> None:
        """Adds a slot of the table's optimizer.

        Args:
            slot: a TensorFlow variable with the table's shape, or with one
                value per row.
            value: the initial value of the slot.
        """
        self._slots.all.append((slot, value))
        self._restore_smaller(slot)

    def reset_slots(self) -> None:
        """Resets slots of rows with new keys to their initial values.

        An optimizer calls it before it updates the table.
        """
        if self.config.reuses_rows:
            rows = vocabulary_ops.take_resets(self.handle)
            for slot, value in self._slots.all:
                self.reset(slot, rows, value)

    def reset(
        self, variable: Variable, rows: tf.Tensor, value: float | None = None
    ) -> None:
        """Resets rows of the table, or of a slot, to their initial values.

        Args:
            variable: a TensorFlow variable, this rank's part.
            rows: int64 `[r]`, rows of the table.
            value: the initial value of a slot; None for the table's own.
        """
        strategy = getattr(variable, "distribute_strategy", None)
        if strategy is None:
            self._reset(variable, rows, value)
            return
        for component in strategy.experimental_local_results(variable):
            self._reset(component, rows, value)

    def _reset(
        self, variable: tf.Variable, rows: tf.Tensor, value: float | None
    ) -> None:
        spec = marks.shard_spec(variable) or self._spec
        per_row = variable.shape.rank == 1
        distribution, a, b = ("constant", value, 0.0)
        if value is None:
            assert self._initial is not None
            distribution, a, b = self._initial
        lookup_ops.reset_rows(
            variable,
            rows,
            rows=spec.rows,
            row_part=spec.cell[0] if spec.cell else 0,
            row_parts=spec.row_parts,
            local_rows=spec.local_rows,
            first_column=0 if per_row else spec.columns[0],
            local_dim=1 if per_row else spec.local_dim,
            seed=self._seed,
            distribution=distribution,
            a=a,
            b=b,
        )

    def counts(self) -> dict[str, int]:
        """Returns counts over all ranks; a joint call of all ranks.

        Returns:
            A dict: "rows" in use; "candidates"; keys "admitted", "evicted" and
            "expired" since the start; "step", the number of steps that were
            learned from.
        """
        mine = vocabulary_ops.vocabulary_counts(self.handle)
        totals = mine
        if self._collectives is not None:
            (totals,) = self._collectives.all_reduce(
                [mine], f"{self._spec.table}/counts"
            )
        found = dict(zip(_COUNTS, totals.numpy().tolist(), strict=False))
        found[STEP] = int(mine[_COUNTS.index(STEP)])
        return found

    def all_keys(self) -> dict[str, np.ndarray]:
        """Returns keys that have rows on every rank; a joint call.

        Returns:
            A dict of arrays sorted by row: "keys" int64 `[n]`, or `[n, 2]`
            fingerprints; "rows", "counts" and "steps", int64 `[n]`; and, if
            texts are stored, "texts".
        """
        keys, counts, steps = (
            array.numpy()
            for array in vocabulary_ops.export_keys(self.handle)[:3]
        )
        bucket, slot = np.nonzero(counts)
        first, _ = self.slices.owned(self._buckets())
        rows = 1 + slot * self._buckets() + bucket + first
        at = (bucket, slot)
        mine = np.column_stack([rows, counts[at], steps[at], keys[at]])
        mine = mine.astype(np.int64)
        if self._collectives is not None:
            mine = self._collectives.all_gather(
                tf.constant(mine), f"{self._spec.table}/keys"
            ).numpy()
        mine = mine[np.argsort(mine[:, 0])]
        found = mine[:, 3:]
        names = ("rows", "counts", "steps")
        by_row = dict(zip(names, mine[:, :3].T, strict=True))
        by_row["keys"] = found[:, 0] if found.shape[1] == 1 else found
        if self.texts is not None:
            of_row = dict(zip(*self.texts.of_all(self._buckets()), strict=True))
            texts = [of_row.get(row, b"") for row in mine[:, 0].tolist()]
            by_row["texts"] = np.array(texts, object)
        return by_row

    def gathered(self) -> dict[str, np.ndarray]:
        """Returns the arrays of a Keras file on every rank; a joint call."""
        found = {}
        for name, value in self._whole().items():
            if self._collectives is not None:
                value = self._collectives.all_gather(
                    value, f"{self._spec.table}/{name}"
                )
            found[name] = self.slices.in_order(value.numpy())
        return found

    def take(self, saved: Mapping[str, np.ndarray]) -> None:
        """Takes this rank's part of the arrays that `gathered` returned.

        Args:
            saved: arrays, or objects that can be sliced, by name.
        """
        self._read_buckets = saved[STEP].shape[0]
        first, end = self.slices.owned(self._read_buckets)
        # As in a checkpoint, a rank that owns no bucket reads one.
        first, end = min(first, self._read_buckets - 1), max(end, first + 1)
        self._restore(
            {
                name: tf.constant(np.asarray(each[first:end]))
                for name, each in saved.items()
            }
        )

    def copy(self) -> Any:
        """Copies the keys of this rank, for `put_back`.

        Returns:
            The number of buckets of all ranks, the hash key and the step; the
            result of `vocabulary_ops.export_keys`; texts, and whether keys of
            the step wait for their gradients.
        """
        counts = vocabulary_ops.vocabulary_counts(self.handle)
        arrays = vocabulary_ops.export_keys(self.handle)
        texts = None if self.texts is None else self.texts.all()
        pending = bool(self.steps.is_pending())
        return int(counts[6]), counts[7:], counts[5], arrays, texts, pending

    def put_back(self, copied: Any) -> None:
        """Restores the keys of this rank.

        Args:
            copied: the result of `copy`.
        """
        *keys, texts, pending = copied
        self.steps.set_pending(pending)
        vocabulary_ops.import_keys(self.handle, *keys)
        if self.texts is not None:
            self.texts.keep(texts)

    def _buckets(self) -> int:
        """Returns the number of all buckets, which a checkpoint may set."""
        return int(vocabulary_ops.vocabulary_counts(self.handle)[6])

    def _export(self) -> dict[str, tf.Tensor]:
        arrays = vocabulary_ops.export_keys(self.handle)
        found = dict(zip((*ROWS, *CANDIDATES), arrays, strict=True))
        counts = vocabulary_ops.vocabulary_counts(self.handle)
        step = tf.concat([counts[5:6], counts[7:]], 0)
        owned = tf.shape(arrays[1])[0]
        found[STEP] = tf.tile(step[tf.newaxis], [owned, 1])
        return found

    def _whole(self) -> dict[str, tf.Tensor]:
        """Returns all saved arrays of this rank's keys."""
        found = self._export()
        return {
            **{name: found[name] for name in self.slices.names},
            **self._packed_texts(self._buckets()),
        }

    def _packed_texts(self, buckets: int) -> dict[str, tf.Tensor]:
        if self.texts is None:
            return {}
        packed = self.texts.packed(
            buckets, self.slices.slots(buckets), *self.slices.owned(buckets)
        )
        return {name: tf.constant(value) for name, value in packed.items()}

    def _piece(self, name: str) -> tf.Tensor | None:
        """Returns one exported array; the first call exports all of them."""
        pieces = self._exported.pieces
        if name not in pieces:
            found = self._export()
            pieces.update({each: found[each] for each in self.slices.names})
        value = pieces.pop(name)
        return value if value.shape[0] else None  # no bucket on this rank

    def _slice_in(self, shape: tuple[int, ...]) -> str:
        """Returns the slice to read from a file, which may be smaller."""
        self._read_buckets = shape[0]
        return self.slices.slice_of(shape)

    def _saved(self) -> Mapping[str, object]:
        if self._collectives is None:
            return self._whole()
        buckets = self._buckets()
        saved = {
            name: self._save_spec(
                name, shape, functools.partial(self._piece, name)
            )
            for name, shape in self.slices.shapes(buckets).items()
        }
        for name, value in self._packed_texts(buckets).items():
            shape = (buckets, *value.shape[1:])
            saved[name] = self._save_spec(
                name, shape, value if value.shape[0] else None, value.dtype
            )
        return saved

    def _save_spec(
        self,
        name: str,
        shape: tuple[int, ...],
        tensor: Callable[[], tf.Tensor] | tf.Tensor | None,
        dtype: tf.DType = tf.int64,
    ) -> dict[str, internals.SaveSpec]:
        slice_spec = self.slices.slice_of(shape)
        return {
            slice_spec: internals.SaveSpec(
                tensor=tensor,
                slice_spec=slice_spec,
                name=name,
                dtype=dtype,
                device="CPU:0",
            )
        }

    def _restore(
        self, restored: dict[str, tf.Tensor | dict[str, tf.Tensor]]
    ) -> None:
        found = {}
        for name, value in restored.items():
            if isinstance(value, dict):
                (value,) = value.values()
            found[name] = value
        # A slice does not contain the number of all buckets.
        buckets = self._read_buckets or found[STEP].shape[0]
        first, end = self.slices.owned(buckets)
        arrays = [found[name][: end - first] for name in ROWS]
        empty = [tf.zeros([end - first, 0], tf.int64)] * 3
        if CANDIDATES[0] in found:
            empty = [found[name][: end - first] for name in CANDIDATES]
        step, hash_key = found[STEP][0], tf.zeros([2], tf.int64)
        if found[STEP].shape.rank == 2:
            step, hash_key = step[0], step[1:]
        vocabulary_ops.import_keys(
            self.handle, buckets, hash_key, step, [*arrays, *empty]
        )
        if self.texts is not None and key_texts.BYTES in found:
            self.texts.take(found, buckets, first, end)


@dataclasses.dataclass
class _Exported:
    """Exported arrays, in an object that a `tf.Module` does not track."""

    pieces: dict[str, tf.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Slots:
    """Slots and initial values, in an object that is not tracked."""

    all: list[tuple[Variable, float]] = dataclasses.field(default_factory=list)


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)
