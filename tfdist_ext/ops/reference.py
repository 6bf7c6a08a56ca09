# SPDX-License-Identifier: Apache-2.0
"""The functions of `embedding_ops.py`, made of stock TensorFlow ops.

Slow and plain: the oracle in the tests. Messages between `encode_ids` and
`decode_ids` are int64 numbers here, not the compressed format of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import reference_random
from tfdist_ext.ops.embedding_ops import OutOfRange
from tfdist_ext.sharding.config import Placement

# rank, samples, bad id found, its sample, its value, samples present, entries
_HEADER = 7
_TAIL = 0.022750131948179195  # P(X < -2) of a standard normal variable X


def encode_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    samples: Any,
    *,
    rank: int,
    world_size: int,
    vocabulary_size: int,
    placement: Placement,
    out_of_range: OutOfRange = "error",
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `embedding_ops.encode_ids`."""
    del layer
    sample, id_, weight = _flatten(ids, row_splits, weights)
    good = (id_ >= 0) & (id_ < vocabulary_size)
    header = [int(rank), _bits(samples), 0, 0, 0]
    if out_of_range == "error" and not tf.reduce_all(good):
        first = tf.where(~good)[0, 0]
        header[2:] = [1, sample[first], id_[first]]
        good = tf.zeros_like(good)
    sample, id_, weight = (x[good] for x in (sample, id_, weight))
    by_row = placement == "row"
    row = id_ // world_size if by_row else id_
    owner = _owner(id_, world_size) if by_row else tf.zeros_like(id_)
    messages, present = [], []
    for each in range(world_size if by_row else 1):
        mine = owner == each
        message, there = _message(
            header, sample[mine], row[mine], weight[mine], vocabulary_size
        )
        messages.append(message)
        present.append(there)
    copies = 1 if by_row else world_size
    return (
        tf.concat(messages, 0),
        tf.constant([int(tf.size(m)) for m in messages] * copies, tf.int64),
        tf.cast(tf.concat(present, 0), tf.int32),
        tf.constant([int(tf.size(p)) for p in present] * copies, tf.int64),
    )


def _flatten(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sample, id and weight of every id, samples ascending, lists in order."""
    ragged = [
        tf.RaggedTensor.from_row_splits(tf.cast(i, tf.int64), s)
        for i, s in zip(ids, row_splits, strict=True)
    ]
    values = [
        tf.RaggedTensor.from_row_splits(
            w if tf.size(w) > 0 else tf.ones(tf.shape(i)), s
        )
        for i, s, w in zip(ids, row_splits, weights, strict=True)
    ]
    merged = tf.concat(ragged, 1)
    return merged.value_rowids(), merged.values, tf.concat(values, 1).values


def _message(
    header: list[Any],
    sample: tf.Tensor,
    row: tf.Tensor,
    weight: tf.Tensor,
    vocabulary_size: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """One owner's message and the samples in it."""
    key = sample * vocabulary_size + row
    unique, index = tf.unique(tf.sort(key))
    total = tf.math.unsorted_segment_sum(
        tf.gather(weight, tf.argsort(key, stable=True)),
        index,
        tf.size(unique),
    )
    present, _, counts = tf.unique_with_counts(
        unique // vocabulary_size, tf.int64
    )
    numbers = tf.concat(
        [
            tf.stack(
                [
                    tf.cast(x, tf.int64)
                    for x in (*header, tf.size(present), tf.size(unique))
                ]
            ),
            counts,
            unique % vocabulary_size,
            _bits(total),
        ],
        0,
    )
    return tf.reshape(tf.bitcast(numbers, tf.uint8), [-1]), present


def _bits(values: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values, tf.float32)
    return tf.cast(tf.bitcast(values, tf.int32), tf.int64)


def _floats(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.cast(bits, tf.int32), tf.float32)


def _owner(ids: tf.Tensor, world_size: int) -> tf.Tensor:
    multiplier = tf.constant(0x9E3779B97F4A7C15 - 2**64, tf.int64)
    product = (ids // world_size) * multiplier
    rotation = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(product, tf.constant(32, tf.int64)),
        tf.constant(0xFFFFFFFF, tf.int64),
    )
    return (ids + rotation) % world_size


def decode_ids(
    payload: tf.Tensor,
    splits: tf.Tensor,
    *,
    rank: int,
    world_size: int,
    vocabulary_size: int,
    placement: Placement,
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `embedding_ops.decode_ids`."""
    del rank, placement
    counts, rows, weights, present, samples = [], [], [], [], []
    for message in tf.split(payload, splits, num=world_size):
        numbers = tf.bitcast(tf.reshape(message, [-1, 8]), tf.int64)
        if numbers[2]:
            _raise_bad_id(layer, numbers, vocabulary_size)
        sizes = [_HEADER, numbers[5], numbers[6], numbers[6]]
        _, count, row, weight = tf.split(numbers, sizes)
        counts.append(count)
        rows.append(row)
        weights.append(_floats(weight))
        present.append(numbers[5])
        samples.append(_floats(numbers[1]))
    all_weights = tf.concat(weights, 0)
    if tf.reduce_all(all_weights == 1):
        all_weights = tf.zeros([0])
    return (
        tf.concat([[0], tf.cumsum(tf.concat(counts, 0))], 0),
        tf.concat(rows, 0),
        all_weights,
        tf.stack(present),
        tf.stack(samples),
    )


def _raise_bad_id(layer: str, numbers: tf.Tensor, limit: int) -> None:
    raise tf.errors.InvalidArgumentError(
        None,
        None,
        f"Layer '{layer}': id {numbers[4]} in sample {numbers[3]} of rank "
        f"{numbers[0]} is out of range: ids must be at least 0 and below "
        f"{limit}. Enlarge the layer's input_dim (the table's "
        "vocabulary_size), correct the input, or drop such ids with "
        "out_of_range='ignore'.",
    )


def merge_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    *,
    vocabulary_size: int,
    out_of_range: OutOfRange = "error",
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `embedding_ops.merge_ids`."""
    sample, id_, weight = _flatten(ids, row_splits, weights)
    good = (id_ >= 0) & (id_ < vocabulary_size)
    if out_of_range == "error" and not tf.reduce_all(good):
        first = tf.where(~good)[0, 0]
        numbers = tf.stack([0, 0, 1, sample[first], id_[first]])
        _raise_bad_id(layer, numbers, vocabulary_size)
    batch = tf.size(row_splits[0], tf.int64) - 1
    splits = tf.searchsorted(
        sample[good], tf.range(batch + 1), out_type=tf.int64
    )
    if all(tf.size(w) == 0 for w in weights):
        return splits, id_[good], tf.zeros([0])
    return splits, id_[good], weight[good]


def lookup(
    variable: Any,
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
) -> tf.Tensor:
    """See `embedding_ops.lookup`; the gradient's rows may repeat."""
    gathered = tf.gather(getattr(variable, "_value", variable), rows)
    if tf.size(weights) > 0:
        gathered = gathered * weights[:, None]
    return tf.math.unsorted_segment_sum(
        gathered, _segments(row_splits), tf.size(row_splits) - 1
    )


def _segments(row_splits: tf.Tensor) -> tf.Tensor:
    samples = tf.range(tf.size(row_splits) - 1)
    return tf.repeat(samples, row_splits[1:] - row_splits[:-1])


def lookup_grad(
    row_splits: tf.Tensor,
    rows: tf.Tensor,
    weights: tf.Tensor,
    grad: tf.Tensor,
) -> tuple[tf.Tensor, tf.Tensor]:
    """See `embedding_ops.lookup_grad`."""
    per_id = tf.gather(grad, _segments(row_splits))
    if tf.size(weights) > 0:
        per_id = per_id * weights[:, None]
    order = tf.argsort(rows, stable=True)
    unique_rows, index = tf.unique(tf.gather(rows, order))
    return unique_rows, tf.math.unsorted_segment_sum(
        tf.gather(per_id, order), index, tf.size(unique_rows)
    )


def init_rows(
    *,
    rank: int,
    world_size: int,
    rows: int,
    dim: int,
    placement: Placement,
    seed: Any,
    distribution: str,
    a: float = 0.0,
    b: float = 0.0,
) -> tf.Tensor:
    """See `embedding_ops.init_rows`."""
    ids = tf.range(rows, dtype=tf.int64)
    columns = tf.range(dim, dtype=tf.int64)
    bits = reference_random.bits(
        tf.cast(seed, tf.int64), ids[:, None], columns[None]
    )
    uniform = (tf.cast(bits, tf.float64) + 0.5) / 2.0**32
    table = {
        "zeros": lambda: tf.zeros([rows, dim], tf.float64),
        "constant": lambda: tf.fill([rows, dim], tf.cast(a, tf.float64)),
        "uniform": lambda: a + (b - a) * uniform,
        "normal": lambda: a + b * tf.math.ndtri(uniform),
        "truncated_normal": lambda: (
            a + b * tf.math.ndtri(_TAIL + (1 - 2 * _TAIL) * uniform)
        ),
    }[distribution]()
    table = tf.cast(table, tf.float32)
    if placement == "column":
        first, end = (r * dim // world_size for r in (rank, rank + 1))
        return table[:, first:end]
    mine = tf.boolean_mask(table, _owner(ids, world_size) == rank)
    padding = -(-rows // world_size) - mine.shape[0]
    return tf.pad(mine, [[0, padding], [0, 0]])
