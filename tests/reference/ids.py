# SPDX-License-Identifier: Apache-2.0
"""The functions of `id_ops.py`, made of stock TensorFlow ops.

Slow and plain: the oracle in the tests. Messages between `encode_ids` and
`decode_ids` are int64 numbers here, not the compressed format of the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.tables.checks import OutOfRange
from tfdist_ext.tables.placement import FeaturePlacement

# rank, samples, bad id found, its feature, its sample, its value
_HEADER = 6
_Triple = tuple[tf.Tensor, tf.Tensor, tf.Tensor]


def encode_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    samples: Any,
    *,
    placements: Sequence[FeaturePlacement],
    rank: int,
    world_size: int,
    list_features: Sequence[int],
    out_of_range: Sequence[str],
    unique: Sequence[bool],
    in_blocks: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `id_ops.encode_ids`."""
    header = [int(rank), _bits(samples), 0, 0, 0, 0]
    features = []
    for f, placement in enumerate(placements):
        lists = [
            (ids[i], row_splits[i], weights[i])
            for i, feature in enumerate(list_features)
            if feature == f
        ]
        sample, id_, weight = _flatten(*zip(*lists, strict=True))
        good = (id_ >= 0) & (id_ < placement.vocabulary_size)
        bad = out_of_range[f] == "error" and not tf.reduce_all(good)
        if bad and not header[2]:
            first = tf.where(~good)[0, 0]
            where = -1 if unique[f] else sample[first]
            header[2:] = [1, f, where, id_[first]]
        features.append((sample[good], id_[good], weight[good]))
    if header[2]:
        features = [tuple(x[:0] for x in each) for each in features]
    messages, present = [], []
    for peer in range(world_size):
        numbers = [_numbers(header)]
        for entries, placement in zip(features, placements, strict=True):
            section, there = _section(entries, placement, peer)
            numbers.append(section)
            present.append(there)
        message = tf.bitcast(tf.concat(numbers, 0), tf.uint8)
        messages.append(tf.reshape(message, [-1]))
    return (
        tf.concat(messages, 0),
        tf.constant([int(tf.size(m)) for m in messages], tf.int64),
        tf.cast(tf.concat(present, 0), tf.int32),
        tf.reshape(
            tf.constant([int(tf.size(p)) for p in present], tf.int64),
            [world_size, -1],
        ),
    )


def _flatten(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> _Triple:
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


def _section(
    entries: _Triple, placement: FeaturePlacement, peer: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """What one rank gets of a feature, and the samples in it."""
    sample, id_, weight = entries
    if peer not in placement.ranks:
        return tf.zeros([0], tf.int64), tf.zeros([0], tf.int64)
    part = placement.ranks.index(peer) // placement.column_parts
    mine = owner_of(id_, placement.row_parts) == part
    sample, weight = sample[mine], weight[mine]
    limit = placement.vocabulary_size
    key = sample * limit + id_[mine] // placement.row_parts
    unique, index = tf.unique(tf.sort(key))
    total = tf.math.unsorted_segment_sum(
        tf.gather(weight, tf.argsort(key, stable=True)),
        index,
        tf.size(unique),
    )
    present, _, counts = tf.unique_with_counts(unique // limit, tf.int64)
    sizes = _numbers([tf.size(present), tf.size(unique)])
    return (
        tf.concat([sizes, counts, unique % limit, _bits(total)], 0),
        present,
    )


def _numbers(values: Sequence[Any]) -> tf.Tensor:
    return tf.stack([tf.cast(x, tf.int64) for x in values])


def _bits(values: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values, tf.float32)
    return tf.cast(tf.bitcast(values, tf.int32), tf.int64)


def _floats(bits: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tf.cast(bits, tf.int32), tf.float32)


def owner_of(ids: tf.Tensor, parts: int) -> tf.Tensor:
    """The row part of every id: rotated mod, see `tables/placement.py`.

    Args:
        ids: int64 `[n]`.
        parts: number of row parts.

    Returns:
        int64 `[n]`.
    """
    multiplier = tf.constant(0x9E3779B97F4A7C15 - 2**64, tf.int64)
    product = (ids // parts) * multiplier
    rotation = tf.bitwise.bitwise_and(
        tf.bitwise.right_shift(product, tf.constant(32, tf.int64)),
        tf.constant(0xFFFFFFFF, tf.int64),
    )
    return (ids + rotation) % parts


def decode_ids(
    payload: tf.Tensor,
    splits: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    rank: int,
    world_size: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """See `id_ops.decode_ids`; rows of a sample always ascend here."""
    none = tf.zeros([0], tf.int64)
    counts, rows, weights, served, samples = [none], [none], [none], [], []
    for message in tf.split(payload, splits, num=world_size):
        numbers = tf.bitcast(tf.reshape(message, [-1, 8]), tf.int64)
        if numbers[2]:
            bad = placements[numbers[3]]
            _raise_bad_id(bad.name, numbers, bad.vocabulary_size)
        samples.append(_floats(numbers[1]))
        numbers = numbers[_HEADER:]
        for placement in placements:
            here = rank in placement.ranks
            served.append(numbers[0] if here else tf.constant(0, tf.int64))
            if not here:
                continue
            present, entries = numbers[0], numbers[1]
            sizes = [2, present, entries, entries, -1]
            _, count, row, weight, numbers = tf.split(numbers, sizes)
            counts.append(count)
            rows.append(row)
            weights.append(weight)
    all_weights = _floats(tf.concat(weights, 0))
    if tf.reduce_all(all_weights == 1):
        all_weights = tf.zeros([0])
    return (
        tf.concat([[0], tf.cumsum(tf.concat(counts, 0))], 0),
        tf.concat(rows, 0),
        all_weights,
        tf.reshape(tf.stack(served), [world_size, -1]),
        tf.stack(samples),
    )


def _raise_bad_id(layer: str, numbers: tf.Tensor, limit: int) -> None:
    sample = "" if numbers[4] < 0 else f" in sample {numbers[4]}"
    raise tf.errors.InvalidArgumentError(
        None,
        None,
        f"Layer '{layer}': id {numbers[5]}{sample} of rank {numbers[0]} is "
        f"out of range: ids must be at least 0 and below {limit}. Enlarge "
        "the layer's input_dim (the table's vocabulary_size), correct the "
        "input, or drop such ids with out_of_range='ignore'.",
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
    """See `id_ops.merge_ids`."""
    sample, id_, weight = _flatten(ids, row_splits, weights)
    good = (id_ >= 0) & (id_ < vocabulary_size)
    if out_of_range == "error" and not tf.reduce_all(good):
        first = tf.where(~good)[0, 0]
        numbers = _numbers([0, 0, 1, 0, sample[first], id_[first]])
        _raise_bad_id(layer, numbers, vocabulary_size)
    batch = tf.size(row_splits[0], tf.int64) - 1
    splits = tf.searchsorted(
        sample[good], tf.range(batch + 1), out_type=tf.int64
    )
    if all(tf.size(w) == 0 for w in weights):
        return splits, id_[good], tf.zeros([0])
    return splits, id_[good], weight[good]


def unique_ids(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """See `id_ops.unique_ids`."""
    unique, positions = tf.unique(tf.sort(ids), tf.int64)
    inverse = tf.math.invert_permutation(tf.argsort(ids, stable=True))
    return unique, tf.gather(positions, inverse)
