# SPDX-License-Identifier: Apache-2.0
"""Variables that hold one rank's part of a table, and of its slots."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator
from collections.abc import Sequence
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.marks import shard_spec
from tfdist_ext.sharding import checkpoint
from tfdist_ext.sharding import hot_rows
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.sharding import whole_tables
from tfdist_ext.tables.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tfdist_ext.collectives.collectives import Collectives


class _Pending(threading.local):
    spec: ShardSpec | None = None


_pending = _Pending()


@contextlib.contextmanager
def creating(spec: ShardSpec) -> Iterator[None]:
    """Variables created inside are this rank's part of a table."""
    _pending.spec = spec if spec.partitioned else None
    try:
        yield
    finally:
        _pending.spec = None


def spec_for(colocate_with: Any) -> ShardSpec | None:
    """What a variable being created holds, None if it is no shard.

    Args:
        colocate_with: the variable it belongs to, given by optimizers for
            slots, or None.
    """
    return _pending.spec or shard_spec(colocate_with)


def is_shard(variable: Any) -> bool:
    """Whether a variable is a part of a partitioned table or of a slot."""
    return shard_spec(variable) is not None


def mark(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a local variable the shard that `spec` describes.

    A slot without the table's shape (a step counter, say) stays local.
    """
    rows = variable.shape[0] if variable.shape.rank else None
    matches = rows == spec.local_shape[0] and (
        variable.shape.rank == 1 or variable.shape == spec.local_shape
    )
    if matches:
        variable._tfdist_shard = spec
        checkpoint.attach(variable, spec, collectives)
        if _pending.spec is not None:  # slots are in nobody's hands
            kernel_reads.refuse(variable, spec)


def gather(variable: Any, collectives: Collectives | None) -> np.ndarray:
    """The whole table that a shard is part of, on every rank.

    Args:
        variable: a shard, or an ordinary variable.
        collectives: of the strategy; every rank must call.

    Returns:
        `[rows, dim]`, or `[rows]` for a slot with one value per row.
    """
    spec = shard_spec(variable)
    inner = getattr(variable, "_value", variable)
    if spec is None or collectives is None:
        return np.asarray(tf.convert_to_tensor(inner))
    local = hot_rows.owned_rows(inner, spec)
    flat = collectives.all_gather(
        tf.reshape(local, [-1]), f"gather/{spec.table}"
    )
    return whole_tables.assemble(flat.numpy(), spec, local.shape.rank)


def gather_to_first(variable: Any, collectives: Collectives) -> np.ndarray:
    """The whole table on rank 0; nothing on the other ranks.

    Args:
        variable: a shard.
        collectives: of the strategy; every rank must call.

    Returns:
        `[rows, dim]` or `[rows]` on rank 0, no rows elsewhere.
    """
    spec = shard_spec(variable)
    assert spec is not None
    local = hot_rows.owned_rows(variable._value, spec)
    flat = tf.reshape(local, [-1])
    splits = tf.pad(tf.size(flat, tf.int64)[None], [[0, spec.world_size - 1]])
    flat, _ = collectives.all_to_all(flat, splits, f"gather/{spec.table}")
    if spec.rank > 0:
        return flat.numpy().reshape((0, spec.dim)[: local.shape.rank])
    return whole_tables.assemble(flat.numpy(), spec, local.shape.rank)


def assign_part(variable: Any, whole: Any) -> None:
    """Assigns this rank's part of a whole table.

    Args:
        variable: a shard.
        whole: `[rows, dim]` or `[rows]`, anything that can be sliced, an
            h5py dataset for example; read in blocks.

    Raises:
        ValueError: if the table has another shape.
    """
    spec = shard_spec(variable)
    assert spec is not None
    inner = getattr(variable, "_value", variable)
    expected = (spec.rows, spec.dim)[: inner.shape.rank]
    if tuple(whole.shape) != expected:
        raise ValueError(
            f"Table '{spec.table}' has shape {expected}. Received values of "
            f"shape {tuple(whole.shape)}."
        )
    if 0 in inner.shape:
        return
    shape, dtype = tuple(inner.shape), inner.dtype.as_numpy_dtype
    # Not the instance's: while a file is read it has another `assign`.
    part = whole_tables.read_part(whole, spec, shape, dtype)
    type(inner).assign(inner, part)


def accept_whole(variable: Any) -> None:
    """Lets `assign` of a shard take a whole table beside its own part."""
    spec = shard_spec(variable)
    if spec is None:
        return
    assign_own = variable.assign

    def assign(value: Any, *args: Any, **kwargs: Any) -> Any:
        shape = tuple(getattr(value, "shape", None) or np.shape(value))
        local = tuple(variable.shape)
        if shape == local or shape != (spec.rows, spec.dim):
            return assign_own(value, *args, **kwargs)
        assign_part(variable, value)
        return variable

    variable.assign = assign


def set_weights(layer: Any, weights: Sequence[Any]) -> None:
    """Sets a layer's weights, each of them whole or as `get_weights` gives it.

    Args:
        layer: of Keras.
        weights: one for each of its weights.

    Raises:
        ValueError: for another number of weights, or other shapes.
    """
    variables = layer.weights
    if len(variables) != len(weights):
        raise ValueError(
            f"Layer '{layer.name}' has {len(variables)} weights. Received: "
            f"{len(weights)}."
        )
    for variable, value in zip(variables, weights, strict=True):
        variable.assign(value)


def check_update(variable: Any, fn: Any, args: Sequence[Any]) -> None:
    """Refuses an update that would train a table wrongly without a word.

    Args:
        variable: a shard, or any other variable.
        fn: what an optimizer gave to `extended.update`.
        args: its arguments; the gradient first, when it is one.

    Raises:
        ValueError: for a gradient that was not made for the shard, or an
            optimizer option that is wrong on a part of a table.
    """
    # Imported here: optimizers import Keras, which a plan does not need.
    from tfdist_ext.optimizers import checks

    fn = inspect.unwrap(fn)
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    for owner in [*cells, getattr(fn, "__self__", None)]:
        if hasattr(owner, "global_clipnorm"):
            checks.check_table_optimizer(owner, variable)
            if is_shard(variable):
                checks.check_supported(owner)
                _check_gradient(variable, args)


def _check_gradient(variable: Any, args: Sequence[Any]) -> None:
    if not args or not isinstance(args[0], tf.Tensor | tf.IndexedSlices):
        return
    shape = getattr(args[0], "dense_shape", None)
    spec = shard_spec(variable)
    assert spec is not None
    if not hasattr(shape, "_tfdist_shard"):
        raise ValueError(
            f"Table '{spec.table}' is partitioned and got a "
            "gradient that does not come from its layer's lookup alone "
            f"({type(args[0]).__name__}). Something else in the model "
            "reads the kernel directly, for example a kernel_regularizer, or "
            "the layer is called in a loop (tf.map_fn). Leave that term out, "
            "or use sharding='replicated' (FullSparse) or "
            "placement='data_parallel' (TableConfig)."
        )
