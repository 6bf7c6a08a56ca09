# SPDX-License-Identifier: Apache-2.0
"""Clipping of each row's gradient by its own norm and count (CowClip)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.collectives import active
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.tables import checks
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable


@dataclasses.dataclass(frozen=True)
class CowClip:
    """Clips the gradient of each row of a table, for large batches.

    The argument `row_clip` of an optimizer takes it:

        tfdist_ext.optimizers.Adam(1e-3, row_clip=CowClip(l2=1e-4))

    A row w that n samples of the global batch have looked up, with gradient g,
    gets

        limit = n * max(ratio * norm(w), floor)
        g = g * min(1, limit / norm(g)) + l2 * w

    before the optimizer's update. Rows that no sample has looked up do not
    change. Gradients of other variables, such as kernels of dense layers, are
    not clipped. A row's norm is over all its columns, also if several ranks
    hold them, which takes one exchange of two numbers per row. NaN stays NaN.

    n is exact at any number of ranks. Tables with deduplicated rows, and
    tables that every rank holds, take one more exchange of a number per row.
    A sample that has a row twice in one feature counts once, unless the
    feature is a sequence (`combiner=None`), of which each id counts. A sample
    that has a row in two features counts twice.

    g is the gradient that the optimizer gets. In Keras it is that of a mean
    over the batch, so that n samples together contribute n / batch. Such
    gradients reach the limit only in rows whose norm is below that of a
    sample's gradient / (batch * ratio).

    To train with a batch s times as large, the source multiplies `l2` by s,
    keeps the learning rate of the tables, and multiplies that of the dense
    layers by the square root of s, with a warm-up.

    Source: Zheng et al., CowClip: Reducing CTR Prediction Model Training Time
    from 12 hours to 10 minutes on 1 GPU, AAAI 2023, arXiv:2204.06240.

    Args:
        ratio: largest norm of a gradient relative to that of its row, per
            sample.
        floor: smallest limit of a gradient's norm, per sample, for rows that
            are near zero.
        l2: factor of L2 regularization of the rows that are looked up.

    Raises:
        ValueError: an argument is no number of at least 0, or `ratio` and
            `floor` are both 0, which would stop training.
    """

    ratio: float = 1.0
    floor: float = 1e-5
    l2: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            checks.number(field.name, getattr(self, field.name), "CowClip")
        if not self.ratio and not self.floor:
            raise ValueError(
                "Arguments `ratio` and `floor` of CowClip cannot both be 0: "
                "no gradient would be left. Received: ratio=0, floor=0. Use "
                "row_clip=None to train without clipping of rows."
            )


def as_row_clip(
    value: CowClip | Config | None, optimizer: str
) -> CowClip | None:
    """The argument `row_clip` of an optimizer, also from a config.

    Args:
        value: CowClip, None, or the mapping of its fields.
        optimizer: name of the optimizer, for errors.

    Raises:
        ValueError: the value is another one.
    """
    if value is None or isinstance(value, CowClip):
        return value
    if isinstance(value, Mapping):
        where = f"row_clip of {optimizer}"
        return CowClip(**checks.fields_of(CowClip, value, where))
    raise ValueError(
        "Argument `row_clip` must be None or a CowClip of "
        "tfdist_ext.optimizers, such as CowClip(ratio=1.0, floor=1e-5). "
        f"Received: row_clip={checks.brief(value)} ({optimizer})."
    )


def clipped(
    clip: CowClip, gradient: Gradient, variable: Variable
) -> TensorOrSlices:
    """Returns the gradient of a table with clipped rows.

    Args:
        clip: the limits.
        gradient: the gradient of the global batch; only IndexedSlices are
            clipped.
        variable: the table or this rank's part of it, a TensorFlow variable.

    Raises:
        ValueError: the samples of the rows are not known, because the gradient
            is not of a lookup of this package, or is one of several eager
            calls.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    # The op returns rows that ascend; `tf.unique` does not sort.
    gradient = tf.IndexedSlices(
        tf.cast(gradient.values, tf.float32),
        gradient.indices,
        gradient.dense_shape,
    )
    gradient = without_duplicates(gradient)
    _, counts = _samples(gradient.indices, variable.name)
    values = gradient.values
    weights = tf.cast(tf.gather(variable, gradient.indices), tf.float32)
    squares = tf.stack(
        [_sums_of_squares(weights), _sums_of_squares(values)], axis=1
    )
    spec = marks.shard_spec(variable)
    if spec is not None and spec.column_parts > 1:
        # Ranks that hold other columns of these rows look up the same ids.
        total = sum_over_ranks(
            tf.reshape(squares, [-1]),
            f"{spec.table}/norms of gradients",
            spec.row_peers,
        )
        squares = tf.reshape(total, [-1, 2])
    of_weights, norms = tf.unstack(tf.sqrt(squares), axis=1)
    limits = counts[:, 0] * tf.maximum(clip.ratio * of_weights, clip.floor)
    # A NaN is not above the limit, and stays.
    factors = tf.where(norms > limits, limits / norms, 1.0)
    values = values * factors[:, tf.newaxis]
    if clip.l2:
        values += clip.l2 * weights
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _sums_of_squares(rows: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.square(rows), axis=1)


def _samples(indices: tf.Tensor, table: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Counts the samples of the global batch by row.

    Args:
        indices: rows of a gradient.
        table: name of the table, for errors.

    Returns:
        The unique rows, int64 `[u]`, ascending, and float32 `[u, 1]`.
    """
    counts = marks.row_counts(indices)
    if counts is not None:
        return counts.count()
    source = marks.row_source(indices)
    if source is not None:
        before, over_ranks = source
        found = _samples(before, table)
        return _over_ranks(*found, table) if over_ranks else found
    kind = indices.op.type if tf.is_symbolic_tensor(indices) else ""
    if kind == "Identity":
        return _samples(indices.op.inputs[0], table)
    if kind == "ConcatV2":  # of the gradients of several calls
        parts = [_samples(part, table) for part in indices.op.inputs[:-1]]
        return _summed([rows for rows, _ in parts], [n for _, n in parts])
    raise ValueError(
        f"Argument `row_clip` needs the number of samples of each row of "
        f"'{table}', and its gradient does not say it. Layers of "
        "tfdist_ext.layers count samples, keras.layers.Embedding does not. "
        "In a step without a graph (run_eagerly=True, or a loop without "
        "tf.function) a layer may be called only once. Use such a layer in a "
        "graph, or leave out `row_clip`."
    )


def _over_ranks(
    rows: tf.Tensor, counts: tf.Tensor, table: str
) -> tuple[tf.Tensor, tf.Tensor]:
    collectives = active()
    if collectives is None:
        return rows, counts
    gathered = [
        collectives.all_gather(each, f"{table}/samples of rows")
        for each in (rows, counts)
    ]
    return _summed(gathered[:1], gathered[1:])


def _summed(
    rows: list[tf.Tensor], counts: list[tf.Tensor]
) -> tuple[tf.Tensor, tf.Tensor]:
    return optimizer_ops.sum_duplicate_rows(
        tf.concat(rows, 0), tf.concat(counts, 0)
    )
