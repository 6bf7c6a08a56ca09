# SPDX-License-Identifier: Apache-2.0
"""Batches as nests of tensors: names, lengths, slices, empty batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops import collective_ops
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike


def names_of(nest: Nest) -> list[str]:
    """A name such as `0/user` for each value, in the order of `tf.nest`.

    Args:
        nest: nest of dicts, tuples and lists. With other containers the names
            are the indices of the values.
    """
    names = list(_names(nest, ""))
    count = len(tf.nest.flatten(nest))
    return names if len(names) == count else [str(i) for i in range(count)]


def _names(nest: Nest, name: str) -> Iterator[str]:
    items: Iterable[tuple[object, Nest]] | None = None
    if isinstance(nest, Mapping):
        items = sorted(nest.items())
    elif isinstance(nest, tuple | list):
        items = enumerate(nest)
    if items is None:
        yield name or "the batch"
        return
    for key, part in items:
        yield from _names(part, f"{name}/{key}".removeprefix("/"))


REMEDY = (
    "Each rank takes its samples of every value of a batch, so the first "
    "dimension of each value that is not a scalar must be the samples. Pad "
    "what belongs to a sample (`padded_batch`, a RaggedTensor), keep "
    "constants in the model, or let each rank make its own batches with "
    "`strategy.distribute_datasets_from_function`."
)


def check_lengths(values: Nest, what: str) -> None:
    """Rejects values of a batch whose numbers of samples differ.

    Args:
        values: tensors of a batch, eager or symbolic, or their specs. Values
            with a dynamic number of samples are not checked.
        what: name of the batch, for the error.

    Raises:
        ValueError: the error names the values and their shapes.
    """
    sizes = {}
    names = names_of(values)
    flat = tf.nest.flatten(values)
    for name, value in zip(names, flat, strict=True):
        size = _static_size(value)
        if size is not None:
            sizes[name] = (size, value.shape)
    if len({size for size, _ in sizes.values()}) > 1:
        raise ValueError(
            error_of_lengths(what, {n: s for n, (_, s) in sizes.items()})
        )


def check_sizes(names: Sequence[str], sizes: Sequence[int]) -> None:
    """Rejects a batch whose values have different numbers of samples.

    Args:
        names: names of the values.
        sizes: numbers of samples of the values; -1 for a scalar.

    Raises:
        ValueError: the error names the values and their sizes.
    """
    if len({size for size in sizes if size >= 0}) > 1:
        pairs = zip(names, sizes, strict=True)
        shapes = {name: (size, "...") for name, size in pairs if size >= 0}
        raise ValueError(error_of_lengths("A batch", shapes))


def size_of(value: TensorLike) -> tf.Tensor:
    """Number of samples of a value, an int64 scalar; -1 for a scalar value."""
    if isinstance(value, tf.SparseTensor):
        return value.dense_shape[0]
    if hasattr(value, "nrows"):  # RaggedTensor and PrefetchedIds.
        return tf.cast(value.nrows(), tf.int64)
    if not isinstance(value, tf.Tensor) or value.shape.rank == 0:
        return tf.constant(-1, tf.int64)
    # A tensor of unknown rank may be a scalar.
    return tf.concat([tf.shape(value, tf.int64), [-1]], 0)[0]


def error_of_lengths(what: str, shapes: Mapping[str, object]) -> str:
    """Error message for different numbers of samples.

    Args:
        what: name of the batch.
        shapes: shapes of the values by their names.
    """
    listed = ", ".join(f"'{n}' {_text(s)}" for n, s in list(shapes.items())[:8])
    return (
        f"{what} has values with different numbers of samples. Received the "
        f"shapes: {listed}. {REMEDY}"
    )


def _static_size(value: object) -> int | None:
    """First dimension of a value; None if it is unknown or a scalar."""
    if value is None or isinstance(value, tf.OptionalSpec):
        return None
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tf.TensorShape) or not shape.rank:
        return None
    size: int | None = shape[0]
    return size


def _text(shape: Shape) -> str:
    sizes = ["..." if size == "..." else str(size) for size in shape]
    return f"[{', '.join(sizes)}]"


def copied(value: tf.Tensor) -> tf.Tensor:
    """A copy of a tensor of rank 1 or more, in new memory."""
    # DeepCopy counts as stateful, and an iterator of a dataset with a
    # stateful op cannot be saved in a checkpoint.
    return tf.roll(value, shift=0, axis=0)


def in_own_memory(batch: Nest) -> Nest:
    """A copy of a batch that shares no memory with arrays of the user."""
    flat = tf.nest.flatten(batch, expand_composites=True)
    return tf.nest.pack_sequence_as(
        batch,
        [part if _is_scalar(part) else copied(part) for part in flat],
        expand_composites=True,
    )


def _is_scalar(value: tf.Tensor) -> bool:
    return value.shape.rank == 0


def slice_of_rank(
    batch: Nest, rank: int, world_size: int, samples: tf.Tensor | None = None
) -> Nest:
    """Samples of a rank: `[rank * n // W, (rank + 1) * n // W)`, or others.

    Args:
        batch: nest of n samples: tensors, RaggedTensors, SparseTensors and
            `PrefetchedIds`; scalars are returned unchanged.
        rank: rank whose samples are returned.
        world_size: W.
        samples: int64 `[2]`, the first sample to return and the one after the
            last, see `samples_between`; None for the equal part of the rank.

    Returns:
        A nest like `batch`, in new memory. With `samples` its static shapes
        do not have the number of samples.
    """
    flat = tf.nest.flatten(batch)
    kinds: dict[int, int] = {}
    for i, value in enumerate(flat):
        kind = _kind(value)
        if kind is not None:
            kinds[i] = kind
        elif hasattr(value, "nrows"):  # PrefetchedIds.
            size = value.nrows()
            start, stop = rank * size // world_size, (rank + 1) * size
            flat[i] = (
                rows(value, start, stop // world_size)
                if samples is None
                else rows(value, samples[0], samples[1])
            )
    if kinds:
        parts = [_parts(flat[i]) for i in kinds]
        together = list(itertools.chain(*parts))
        cut = iter(
            collective_ops.slice_of_rank(
                together, list(kinds.values()), rank, world_size, samples
            )
        )
        for i, those in zip(kinds, parts, strict=True):
            pieces = [next(cut) for _ in those]
            size = None if samples is not None else _static_size(flat[i])
            if size is not None:
                size = _size_of_slice(size, rank, world_size) or None
            flat[i] = _like(flat[i], pieces, size)
    return tf.nest.pack_sequence_as(batch, flat)


def samples_between(
    batch: Nest, shares: tf.Tensor, by_ids: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """The consecutive samples between two shares of a batch.

    Samples are cut where the samples before them are nearest to the share, so
    the slices of ranks whose shares are contiguous are contiguous, too.

    Args:
        batch: nest as in `slice_of_rank`, with at least one value that is no
            scalar.
        shares: float64 `[2]`, ascending, from 0 to 1.
        by_ids: whether shares are of the ids of the batch, not of its samples.
            A sample counts as one more than its ids: the values that it has in
            all RaggedTensors and SparseTensors.

    Returns:
        int64 `[2]`, the first sample and the one after the last; and their
        work, an int64 scalar: the number of samples, or of ids and samples.
    """
    before = _work_before(batch) if by_ids else None
    if before is None:
        sizes = [size_of(value) for value in _with_samples(batch)]
        total = tf.cast(tf.reduce_max(tf.stack(sizes)), tf.float64)
        samples = tf.cast(tf.round(shares * total), tf.int64)
        return samples, samples[1] - samples[0]
    exact = tf.cast(before, tf.float64)
    goal = shares * exact[-1]
    above = tf.searchsorted(exact, goal, out_type=tf.int64)
    below = tf.maximum(above - 1, 0)
    nearer = goal - tf.gather(exact, below) < tf.gather(exact, above) - goal
    samples = tf.where(nearer, below, above)
    ends = tf.gather(before, samples)
    return samples, ends[1] - ends[0]


def _with_samples(batch: Nest) -> list[TensorLike]:
    return [
        value
        for value in tf.nest.flatten(batch)
        if _kind(value) is not None or hasattr(value, "nrows")
    ]


def _work_before(batch: Nest) -> tf.Tensor | None:
    """Ids and samples before each sample, int64 `[n + 1]`; None without ids."""
    before = None
    for value in tf.nest.flatten(batch):
        if isinstance(value, tf.RaggedTensor):
            ids = _ids_before(value)
        elif isinstance(value, tf.SparseTensor):
            ids = _entries_before(value)
        else:
            continue
        if before is None:
            before = tf.range(tf.size(ids, tf.int64))
        before += ids
    return before


def _ids_before(value: tf.RaggedTensor) -> tf.Tensor:
    """Flat values of a RaggedTensor before each sample, int64 `[n + 1]`."""
    first, *inner = value.nested_row_splits
    for splits in inner:
        first = tf.gather(splits, first)
    return tf.cast(first, tf.int64)


def _entries_before(value: tf.SparseTensor) -> tf.Tensor:
    """Entries of a SparseTensor before each sample, int64 `[n + 1]`."""
    samples = value.indices[:, 0]
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(samples), samples, value.dense_shape[0]
    )
    return tf.concat([[0], tf.cumsum(counts)], 0)


def _kind(value: object) -> int | None:
    """Code of a value in `collective_ops`; None if it is not sliced there."""
    if isinstance(value, tf.SparseTensor):
        return collective_ops.SPARSE
    if isinstance(value, tf.RaggedTensor):
        return len(value.nested_row_splits)
    if isinstance(value, tf.Tensor) and not _is_scalar(value):
        return collective_ops.DENSE
    return None  # A scalar, PrefetchedIds, or an Optional for Keras's None.


def _parts(value: TensorLike) -> list[tf.Tensor]:
    if isinstance(value, tf.SparseTensor):
        return [value.indices, value.values, value.dense_shape]
    if isinstance(value, tf.RaggedTensor):
        return [value.flat_values, *value.nested_row_splits]
    return [value]


def _like(
    value: TensorLike, parts: list[tf.Tensor], size: int | None
) -> TensorLike:
    """Converts slices of the parts of a value to the type of the value.

    Args:
        value: value that was sliced.
        parts: slices of its tensors.
        size: number of samples; None if it is not static.
    """
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_splits(
            parts[0], parts[1:], validate=False
        )
    if not isinstance(value, tf.SparseTensor):
        return parts[0]
    piece = tf.SparseTensor(*parts)
    if value.shape.rank is None:
        return piece
    return _with_static_shape(piece, [size, *value.shape[1:]])


def rows(value: TensorLike, start: tf.Tensor, stop: tf.Tensor) -> TensorLike:
    """Rows `[start, stop)` of a value, in new memory.

    Args:
        value: Tensor, RaggedTensor or `PrefetchedIds`.
        start: integer scalar.
        stop: integer scalar.
    """
    if isinstance(value, tf.RaggedTensor):
        # The copy is needed because TensorFlow subtracts in place.
        splits = copied(value.row_splits[start : stop + 1])
        return tf.RaggedTensor.from_row_splits(
            rows(value.values, splits[0], splits[-1]),
            splits - splits[0],
            validate=False,
        )
    piece = value[start:stop]
    return copied(piece) if isinstance(piece, tf.Tensor) else piece


def _size_of_slice(samples: int, rank: int, world_size: int) -> int:
    return (rank + 1) * samples // world_size - rank * samples // world_size


def _with_static_shape(
    value: tf.SparseTensor, shape: list[int | None]
) -> tf.SparseTensor:
    # The static shape of a SparseTensor is derived from its dense_shape.
    parts = [
        value.dense_shape[i] if size is None else tf.constant(size, tf.int64)
        for i, size in enumerate(shape)
    ]
    return tf.SparseTensor(value.indices, value.values, tf.stack(parts))


def empty_like(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Infinite batches of zero samples, with the specs of a dataset.

    Args:
        dataset: dataset of tensors, RaggedTensors, SparseTensors, Keras's
            None and values whose spec has `empty()`, such as `PrefetchedIds`.

    Raises:
        ValueError: a tensor has an unknown rank.
    """
    elements = tf.nest.map_structure(_empty, dataset.element_spec)
    return tf.data.Dataset.from_tensors(elements).repeat()


def _empty(spec: tf.TypeSpec) -> TensorLike:
    if hasattr(spec, "empty"):
        return spec.empty()
    if isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if isinstance(spec, tf.RaggedTensorSpec):
        return _empty_ragged(spec)
    if spec.shape.rank is None:
        raise ValueError(
            "The ranks have different numbers of batches and an element "
            f"of unknown rank cannot be padded. Received: spec={spec}. "
            "Set the shapes in the input pipeline."
        )
    if isinstance(spec, tf.SparseTensorSpec):
        shape = _without_samples(spec.shape)
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64),
            tf.zeros([0], spec.dtype),
            tf.constant(shape, tf.int64),
        )
    shape = _without_samples(spec.shape) if spec.shape else []
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)


def _empty_ragged(spec: tf.RaggedTensorSpec) -> tf.RaggedTensor:
    flat = _without_samples(spec.shape[spec.ragged_rank :])
    ragged = tf.zeros(flat, spec.dtype)
    for _ in range(spec.ragged_rank):
        ragged = tf.RaggedTensor.from_row_splits(
            ragged, tf.zeros([1], spec.row_splits_dtype)
        )
    return ragged


def _without_samples(shape: tf.TensorShape) -> list[int]:
    return [0, *(size or 0 for size in shape[1:])]
