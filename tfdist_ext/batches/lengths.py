# SPDX-License-Identifier: Apache-2.0
"""Values of a batch that do not have a row for each sample are refused.

A rank takes its samples of every value of a batch. Of a table of constants,
or of nodes and edges of graphs, it would take rows that do not belong to its
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches import leaves

Nest = Any
REMEDY = (
    "Each rank takes its samples of every value of a batch, so all values "
    "that are no scalars need the samples as their first dimension. Pad what "
    "belongs to a sample (`padded_batch`, a RaggedTensor), keep constants in "
    "the model, or let each rank make its own batches with "
    "`strategy.distribute_datasets_from_function`."
)


def check(values: Nest, what: str) -> None:
    """Refuses values of a batch whose numbers of samples differ.

    Args:
        values: tensors of a batch, eager or of a graph, or what describes
            them. What is not known (of a dynamic shape) passes.
        what: they are, for the error.

    Raises:
        ValueError: naming the values and their shapes.
    """
    sizes = {}
    names = leaves.names_of(values)
    flat = tf.nest.flatten(values)
    for name, value in zip(names, flat, strict=True):
        size = _size(value)
        if size is not None:
            sizes[name] = (size, value.shape)
    if len({size for size, _ in sizes.values()}) > 1:
        raise ValueError(error_of(what, {n: s for n, (_, s) in sizes.items()}))


def check_sizes(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Refuses a batch whose values have different numbers of samples.

    Args:
        names: of the values.
        sizes: of the values, -1 of a scalar.

    Raises:
        ValueError: naming the values and their sizes.
    """
    if len({size for size in sizes if size >= 0}) > 1:
        pairs = zip(names, sizes, strict=True)
        shapes = {name: (size, "...") for name, size in pairs if size >= 0}
        raise ValueError(error_of("A batch", shapes))


def size_of(value: Any) -> tf.Tensor:
    """int64 scalar, the samples of a value in a graph, -1 of a scalar."""
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    if hasattr(value, "nrows"):  # of RaggedTensor and PrefetchedIds
        return tf.cast(value.nrows(), tf.int64)
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return tf.constant(-1, tf.int64)
    # Of an unknown rank it may be a scalar.
    return tf.concat([tf.shape(value, tf.int64), [-1]], 0)[0]


def error_of(what: str, shapes: dict[str, Any]) -> str:
    """The text of the refusal.

    Args:
        what: the values are.
        shapes: of the values, by name.
    """
    listed = ", ".join(f"'{n}' {_text(s)}" for n, s in list(shapes.items())[:8])
    return (
        f"{what} has values with different numbers of samples. Received the "
        f"shapes: {listed}. {REMEDY}"
    )


def _size(value: Any) -> int | None:
    """The first dimension of a value, None if unknown or a scalar."""
    if value is None or isinstance(value, tf.OptionalSpec):
        return None
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tf.TensorShape) or not shape.rank:
        return None
    size: int | None = shape[0]
    return size


def _text(shape: Any) -> str:
    sizes = ["..." if size == "..." else str(size) for size in shape]
    return f"[{', '.join(sizes)}]"
