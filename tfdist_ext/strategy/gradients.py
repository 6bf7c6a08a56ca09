# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the ranks: dense, sparse, and those of shards."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.ops.optimizer_ops import sum_duplicate_rows
from tfdist_ext.optimizers.row_gradients import is_of_one_lookup
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.strategy.bucket_sums import BucketSums
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import WithGradient


class ErrorFeedback(BucketSums):
    """All-reduce in 16 bits with error feedback, before and after the sum.

    The rounding error of a rank's part is added to its part of the next
    step. The rank that sums a chunk does the same with the sum. So errors do
    not accumulate over steps, with any kind of rounding.

    The errors are float32 values, 1 + 1 / world_size times as many as there
    are gradient values. See `BucketSums` for where they are stored.

    Source: Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent
    with Double-Pass Error-Compensated Compression, ICML 2019,
    arXiv:1905.05957.

    Args:
        collectives: collectives of the strategy; values are sent with their
            `gradient_dtype`.
    """

    def sum_of(self, flat: tf.Tensor, label: str) -> tf.Tensor:
        """Reduce-scatter and all-gather of a float32 `[n]`."""
        collectives = self.collectives
        ranks = collectives.group.world_size
        size = flat.shape.num_elements()
        chunk = -(-size // ranks)
        flat = tf.pad(flat, [[0, ranks * chunk - size]])
        place = label, collectives.occurrence(label)
        sent = self._round(flat, (*place, "part", ranks * chunk))
        splits = tf.fill([ranks], tf.constant(chunk, tf.int64))
        parts, _ = collectives.all_to_all(sent, splits, label)
        parts = tf.cast(tf.reshape(parts, [ranks, chunk]), tf.float32)
        total = tf.reduce_sum(parts, axis=0)
        total = self._round(total, (*place, "sum", chunk))
        gathered = collectives.all_gather(total, label)
        return tf.cast(gathered[:size], tf.float32)

    def _round(
        self, exact: tf.Tensor, key: tuple[str, int, str, int]
    ) -> tf.Tensor:
        exact += self.error(key)
        rounded = tf.cast(exact, self.collectives.gradient_dtype)
        self.keep(key, exact - tf.cast(rounded, tf.float32))
        return rounded


# The gradient of an entire table up to this size is sent with those of the
# other small tables, which is faster than sending its rows.
_SMALL_TABLE_BYTES = 256 << 10


def reduce_values(
    collectives: Collectives,
    values: list[TensorOrSlices],
    label: str,
    weighted: bool,
    wire_dtype: tf.DType = tf.float32,
    sums: BucketSums | None = None,
    unweighted: int = 0,
) -> list[TensorOrSlices]:
    """Sums values over the ranks, or takes their mean.

    Args:
        collectives: collectives of the strategy.
        values: tensors, IndexedSlices or Python numbers. Gradients of shards
            have a marked `dense_shape`. They are sums over all ranks already
            and are not sent.
        label: names the exchange in errors.
        weighted: take means, weighted by each rank's samples in the step.
        wire_dtype: dtype in which float32 values are sent. Parts and sums are
            rounded to it; parts are added up in float32.
        sums: sums dense float32 instead, and stores the errors.
        unweighted: number of the last values, tensors that are no gradients.
            They are summed as they are, without weights.

    Returns:
        The results, in order. IndexedSlices contain each row as often as in
        one process with the global batch, because an optimizer may clip or
        square each one. Rows of a gradient that is marked as unique are summed.
    """
    result = list(values)
    round_to = {tf.float32: wire_dtype}
    dense: dict[int, tf.Tensor] = {}
    small: dict[int, tf.Tensor] = {}
    for i, value in enumerate(values):
        if not isinstance(value, tf.IndexedSlices):
            dense[i] = tf.convert_to_tensor(value)
        elif marks.gradient_spec(value) is not None:
            result[i] = _with_rows_once(value)
        elif marks.is_unique(value) and _is_small(value):
            small[i] = _as_table(value)
        else:
            rows = (collectives, value, label, weighted, round_to)
            result[i] = _gather_rows(*rows)
    plain = range(len(values) - unweighted, len(values))
    totals = _sum_dense(
        collectives, dense, label, weighted, round_to, sums, plain
    )
    totals |= _sum_dense(
        collectives, small, f"{label}/small tables", weighted, round_to, None
    )
    for i, total in totals.items():
        result[i] = _as_slices(total, values[i]) if i in small else total
    for value, own in zip(result, values, strict=True):
        if isinstance(value, tf.IndexedSlices) and not marks.gradient_spec(own):
            marks.set_row_source(value.indices, own.indices, over_ranks=True)
    return result


def differentiable(
    reduce: Callable[[list[TensorOrSlices]], list[TensorOrSlices]],
    values: list[TensorOrSlices],
    collectives: Collectives,
) -> list[TensorOrSlices]:
    """Gradients of the global batch that a tape can differentiate again.

    Args:
        reduce: computes them from the gradients of the ranks.
        values: gradients of this rank; those of shards are returned
            unchanged.
        collectives: collectives of the strategy.
    """
    result = list(values)
    dense = [
        i
        for i, value in enumerate(values)
        if not isinstance(value, tf.IndexedSlices)
        or marks.gradient_spec(value) is None
    ]

    if not dense:
        return result

    @tf.custom_gradient
    def reduced(*parts: tf.Tensor) -> WithGradient:
        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            ranks = collectives.group.world_size
            return collectives.all_reduce(
                [each / tf.cast(ranks, each.dtype) for each in upstream],
                "gradients/second",
                weighted=True,
            )

        return reduce(list(parts)), backward

    found = reduced(*(tf.convert_to_tensor(values[i]) for i in dense))
    found = found if isinstance(found, list | tuple) else [found]
    for i, value in zip(dense, found, strict=True):
        result[i] = value
    return result


def _sum_dense(
    collectives: Collectives,
    dense: Mapping[int, tf.Tensor],
    label: str,
    weighted: bool,
    round_to: Mapping[tf.DType, tf.DType],
    special: BucketSums | None,
    plain: range = range(0),
) -> dict[int, tf.Tensor]:
    """Sums of tensors by the keys of `dense`; see `reduce_values`.

    Those of `plain` are the last ones and have no weights.
    """
    result: dict[int, tf.Tensor] = {}
    if weighted:
        # Divided first, because the wire dtype may overflow at the sum.
        ranks = collectives.group.world_size
        dense = {
            i: value / tf.constant(ranks, value.dtype)
            if value.dtype.is_floating and i not in plain
            else value
            for i, value in dense.items()
        }
    if special is not None:
        chosen = [
            i
            for i, value in dense.items()
            if value.dtype == tf.float32
            and value.shape.is_fully_defined()
            and i not in plain
        ]
        sums = special.all_reduce([dense[i] for i in chosen], label, weighted)
        result = dict(zip(chosen, sums, strict=True))
    for floating in (True, False):
        chosen = [
            i
            for i, value in dense.items()
            if value.dtype.is_floating == floating and i not in result
        ]
        parts = [
            dense[i]
            if i in plain
            else tf.cast(dense[i], round_to.get(dense[i].dtype, dense[i].dtype))
            for i in chosen
        ]
        unweighted = sum(i in plain for i in chosen)
        sums = collectives.all_reduce(
            parts, label, weighted and floating, unweighted
        )
        for i, total in zip(chosen, sums, strict=True):
            result[i] = tf.cast(total, dense[i].dtype)
    return result


def _with_rows_once(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """A shard's gradient; a layer that is called twice adds rows twice."""
    if is_of_one_lookup(slices):
        return slices
    rows, summed = sum_duplicate_rows(slices.indices, slices.values)
    marks.set_row_source(rows, slices.indices)
    return tf.IndexedSlices(summed, rows, slices.dense_shape)


def _is_small(slices: tf.IndexedSlices) -> bool:
    shape = slices.dense_shape
    shape = None if shape is None else tf.get_static_value(shape)
    if shape is None:
        return False
    return int(shape.prod()) * slices.dtype.size <= _SMALL_TABLE_BYTES


def _as_table(slices: tf.IndexedSlices) -> tf.Tensor:
    """The gradient of an entire table, `[rows, width + 1]`.

    The last column is nonzero in rows of the slices: a lazy update rule does
    not change rows that no rank has looked up.
    """
    rows = int(tf.get_static_value(slices.dense_shape)[0])
    width = int(tf.get_static_value(slices.dense_shape)[1:].prod())
    flat = tf.reshape(slices.values, [-1, width])
    flat = tf.pad(flat, [[0, 0], [0, 1]], constant_values=1)
    table = tf.math.unsorted_segment_sum(flat, slices.indices, rows)
    return tf.ensure_shape(table, [rows, width + 1])


def _as_slices(table: tf.Tensor, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Rows of a sum of `_as_table` that any rank has looked up."""
    touched = tf.where(table[:, -1] > 0)[:, 0]
    shape = tf.get_static_value(slices.dense_shape)
    values = tf.reshape(tf.gather(table[:, :-1], touched), [-1, *shape[1:]])
    indices = tf.cast(touched, slices.indices.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _gather_rows(
    collectives: Collectives,
    slices: tf.IndexedSlices,
    label: str,
    weighted: bool,
    round_to: Mapping[tf.DType, tf.DType],
) -> tf.IndexedSlices:
    rows = slices.values
    share = collectives.share_of_samples(label) if weighted else None
    if share is not None:
        share = share / collectives.group.world_size
        rows = rows * tf.cast(share, rows.dtype)
    sent = tf.cast(rows, round_to.get(rows.dtype, rows.dtype))
    gathered = tf.IndexedSlices(
        tf.cast(collectives.all_gather(sent, f"{label}/rows"), rows.dtype),
        collectives.all_gather(slices.indices, f"{label}/indices"),
        slices.dense_shape,
    )
    if marks.is_unique(slices):
        return without_duplicates(gathered)
    return gathered
