# SPDX-License-Identifier: Apache-2.0
"""Ops on messages between ranks: ids, and numbers in short forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import OutOfRange
from tfdist_ext.tables.checks import Rounding
from tfdist_ext.tables.placement import FeaturePlacement

_NAMES = (
    "world_size",
    "features",
    "vocabulary_sizes",
    "dims",
    "row_parts",
    "column_parts",
    "ranks",
)


def placement_attributes(
    placements: Sequence[FeaturePlacement], world_size: int
) -> dict[str, Any]:
    """Attributes by their names.

    Args:
        placements: of every feature.
        world_size: number of ranks.
    """
    values = (
        world_size,
        [each.name for each in placements],
        [each.vocabulary_size for each in placements],
        [each.dim for each in placements],
        [each.row_parts for each in placements],
        [each.column_parts for each in placements],
        [rank for each in placements for rank in each.ranks],
    )
    return dict(zip(_NAMES, values, strict=True))


def same_placement_as(op: Any) -> dict[str, Any]:
    """The attributes of an op, for that of its gradient."""
    return {name: op.get_attr(name) for name in _NAMES}


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
    """Merges lists of ids for a table that this rank alone has.

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


def to_wire(
    x: tf.Tensor,
    dtype: tf.DType,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """Rounds numbers to the dtype that travels.

    Args:
        x: float32, any shape.
        dtype: tf.float32 (nothing happens), tf.bfloat16 or tf.float16.
        rounding: "nearest" is tf.cast. "stochastic" takes one of the two
            neighbours in `dtype` so that the mean is x: errors of many small
            gradients cancel instead of adding up.
        seed: int64 scalar; with an element's index it determines the random
            choice. Unused with "nearest".

    Returns:
        `dtype`, shape of x. NaN stays NaN; infinity, and what is beyond the
        largest number of `dtype`, becomes infinity. The gradient is the
        upstream gradient as float32.

    Raises:
        ValueError: another rounding.
    """
    if not _is_stochastic(rounding, dtype):
        return tf.cast(x, dtype)
    return library().tfdist_round_to_wire(x, tf.cast(seed, tf.int64), T=dtype)


@tf.RegisterGradient("Tfdist>RoundToWire")
def _round_to_wire_gradient(_: Any, grad: tf.Tensor) -> list[Any]:
    return [tf.cast(grad, tf.float32), None]


def from_wire(
    x: tf.Tensor,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """The numbers that have arrived, as float32.

    Args:
        x: float32, bfloat16 or float16, any shape.
        rounding: of the gradient, on its way back: see `to_wire`.
        seed: of that rounding.

    Returns:
        float32, shape of x. The gradient is the upstream gradient rounded to
        the dtype of x.

    Raises:
        ValueError: another rounding.
    """
    x = tf.convert_to_tensor(x)
    if not _is_stochastic(rounding, x.dtype):
        return tf.cast(x, tf.float32)
    return _widen(x, tf.cast(seed, tf.int64))


@tf.custom_gradient
def _widen(x: tf.Tensor, seed: tf.Tensor) -> Any:
    def grad(upstream: tf.Tensor) -> tuple[tf.Tensor, None]:
        rounded = to_wire(upstream, x.dtype, rounding="stochastic", seed=seed)
        return rounded, None

    return tf.cast(x, tf.float32), grad


def _is_stochastic(rounding: str, dtype: tf.DType) -> bool:
    checks.one_of("rounding", rounding, checks.ROUNDINGS, "numbers on a wire")
    return rounding == "stochastic" and dtype != tf.float32


def pack_numbers(
    values: tf.Tensor, splits: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs numbers for several receivers, without loss.

    Numbers of similar size share the upper bits of their exponents: 32 bits
    become about 27, 16 bits of bfloat16 about 11 (see `number_codec.h`).

    Args:
        values: float32, bfloat16 or float16 `[n]`, receiver by receiver.
        splits: int64 `[receivers]`, how many numbers each gets.

    Returns:
        uint8 `[m]`, the messages, and int64 `[receivers]`, their bytes.

    Raises:
        tf.errors.InvalidArgumentError: if splits do not add up.
    """
    payload, byte_splits = library().tfdist_pack_numbers(values, splits)
    return payload, byte_splits


def unpack_numbers(
    payload: tf.Tensor, byte_splits: tf.Tensor, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """The inverse of `pack_numbers`.

    Args:
        payload: uint8 `[m]`, messages of several senders.
        byte_splits: int64 `[senders]`, their bytes.
        dtype: of the numbers.

    Returns:
        `[n]` of `dtype`, bit for bit what was packed, and int64 `[senders]`,
        how many came from each.

    Raises:
        tf.errors.DataLossError: malformed bytes.
    """
    values, splits = library().tfdist_unpack_numbers(
        payload, byte_splits, T=dtype
    )
    return values, splits
