# SPDX-License-Identifier: Apache-2.0
"""Ops on ids: to the owners of their rows, merged, split, made unique.

The ids of a batch are in CSR form: sample s has `ids[row_splits[s] :
row_splits[s + 1]]`. Weights are float32 of the same length, or empty when all
are one. `tests/reference/ids.py` has the same functions made of stock ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.ops.placement_attributes import placement_attributes
from tfdist_ext.tables.choices import OutOfRange
from tfdist_ext.tables.placement import FeaturePlacement


def encode_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    samples: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    rank: int,
    world_size: int,
    list_features: Sequence[int],
    out_of_range: Sequence[str],
    unique: Sequence[bool],
    in_blocks: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Codes the ids of all features for the ranks that own their rows.

    Lists of a feature are merged per sample, duplicates combined. With one
    feature of 2 row parts, rank 0 owning the even ids:

        ids [[4, 7, 4], [2]]  ->  to rank 0: sample 0 {4: 2}, sample 1 {2: 1}
                                  to rank 1: sample 0 {7: 1}
                                  sample_ids [0, 1, 0]
                                  sample_splits [[2], [1]]

    Args:
        ids: lists of int32 or int64 `[n_i]`, all of one dtype.
        row_splits: int64 `[b_i + 1]` for every list, b_i alike in a feature.
        weights: float32 `[n_i]` or `[0]` for every list.
        samples: float32 scalar, this rank's weight in the batch mean.
        placements: of every feature, F in all.
        rank, world_size: of this process, and the number of ranks.
        list_features: the feature of every list; ascending, without gaps.
        out_of_range: for every feature "error" (`decode_ids` fails on every
            rank) or "ignore" (bad ids are dropped).
        unique: for every feature, whether each sample has one id and these
            ascend strictly, as those of `unique_ids`: fewer bytes.
        in_blocks: whether GPUs decode, which begin at many places at once.

    Returns:
        `payload` uint8 `[B]`, the messages to all ranks; `send_splits` int64
        `[world_size]`, their bytes; `sample_ids` int32 `[m]`, for every rank
        and feature the samples in the message, ascending; `sample_splits`
        int64 `[world_size, F]`, how many.

    Raises:
        tf.errors.InvalidArgumentError: malformed lists, a broken promise.
    """
    outputs = library().tfdist_encode_ids(
        ids,
        row_splits,
        weights,
        samples,
        list_features=list(list_features),
        out_of_range=list(out_of_range),
        unique=list(unique),
        in_blocks=in_blocks,
        rank=rank,
        **placement_attributes(placements, world_size),
    )
    return tuple(outputs)


def decode_ids(
    payload: tf.Tensor,
    splits: tf.Tensor,
    *,
    placements: Sequence[FeaturePlacement],
    rank: int,
    world_size: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Decodes what `encode_ids` of all ranks sent to this one.

    Args:
        payload: uint8 `[B]`, messages in order of their ranks.
        splits: int64 `[world_size]`, their bytes.
        placements: of every feature, as given to `encode_ids`.
        rank: of this process.
        world_size: number of ranks.

    Returns:
        `row_splits` int64 `[S + 1]`, the samples in order of source rank, then
        feature; `rows` int64 `[n]`, unique local rows of every sample,
        ascending; `weights` float32 `[n]` or `[0]`; `served` int64
        `[world_size, F]`, the samples from every rank of every feature, 0
        where this rank holds no part of its table; `samples` float32
        `[world_size]`, what every rank gave to `encode_ids`.

    Raises:
        tf.errors.InvalidArgumentError: on every rank alike, if a rank met an
            id out of range.
        tf.errors.DataLossError: malformed bytes.
    """
    row_splits, rows, weights, served, samples = library().tfdist_decode_ids(
        payload,
        splits,
        rank=rank,
        **placement_attributes(placements, world_size),
    )
    return row_splits, rows, weights, served, samples


def merge_ids(
    ids: Sequence[tf.Tensor],
    row_splits: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
    *,
    vocabulary_size: int,
    out_of_range: OutOfRange = "error",
    layer: str = "",
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Merges lists of ids for a table that lies on this rank alone.

    Args:
        ids: lists of int32 or int64 `[n_i]`.
        row_splits: int64 `[b + 1]` for every list.
        weights: float32 `[n_i]` or `[0]` for every list.
        vocabulary_size: rows of the table.
        out_of_range: "error" or "ignore".
        layer: name for errors.

    Returns:
        `row_splits` int64 `[b + 1]`, `rows` int64 `[n]`, `weights` float32
        `[n]` or `[0]`.

    Raises:
        tf.errors.InvalidArgumentError: an id out of range, malformed inputs.
    """
    merged_splits, rows, merged_weights = library().tfdist_merge_ids(
        ids,
        row_splits,
        weights,
        vocabulary_size=vocabulary_size,
        out_of_range=out_of_range,
        layer=layer,
    )
    return merged_splits, rows, merged_weights


def unique_ids(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the unique ids of a batch.

    Args:
        ids: int64 `[n]`.

    Returns:
        The unique ids ascending, int64 `[u]`, and where every id is among
        them, int64 `[n]`.

    Raises:
        tf.errors.InvalidArgumentError: ids are not a vector.
    """
    unique, positions = library().tfdist_unique_ids(ids)
    return unique, positions
