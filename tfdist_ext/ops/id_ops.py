# SPDX-License-Identifier: Apache-2.0
"""Ops on messages between ranks: ids, and numbers in a wire format."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import OutOfRange
from tfdist_ext.tables.checks import Rounding
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import WithGradient

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
) -> Keywords:
    """Returns the attributes of ops that describe placements, by name.

    Args:
        placements: the placement of every feature's table.
        world_size: the number of ranks.
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


def same_placement_as(op: tf.Operation) -> Keywords:
    """Returns the placement attributes of an op, for its gradient op."""
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
    """Encodes the ids of all features for the owners of their rows.

    Lists of a feature are merged per sample, and duplicates are combined. For
    example, one feature has 2 row parts, and rank 0 owns the even ids:

        ids [[4, 7, 4], [2]]  ->  to rank 0: sample 0 {4: 2}, sample 1 {2: 1}
                                  to rank 1: sample 0 {7: 1}
                                  sample_ids [0, 1, 0]
                                  sample_splits [[2], [1]]

    Args:
        ids: lists, int32 or int64 `[n_i]`, all of one dtype.
        row_splits: int64 `[b_i + 1]` per list; b_i is equal within a feature.
        weights: float32 `[n_i]` per list, or `[0]` if all weights are 1.
        samples: float32 scalar, this rank's weight in the batch mean.
        placements: the placements of the F features' tables.
        rank, world_size: the rank of this process, and the number of ranks.
        list_features: the feature of every list; ascending, without gaps.
        out_of_range: per feature "error" (`decode_ids` fails on every rank) or
            "ignore" (bad ids are dropped).
        unique: per feature, whether each sample has one id and ids ascend
            strictly, as those of `unique_ids`. This needs fewer bytes.
        in_blocks: whether GPUs decode the ids, in parallel blocks.

    Returns:
        `payload` uint8 `[B]`, the messages to all ranks; `send_splits` int64
        `[world_size]`, their bytes; `sample_ids` int32 `[m]`, the samples sent
        to every rank for every feature, ascending; `sample_splits` int64
        `[world_size, F]`, their number.

    Raises:
        tf.errors.InvalidArgumentError: if lists are malformed or not `unique`.
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
    """Decodes the messages that `encode_ids` of all ranks made for this rank.

    Args:
        payload: uint8 `[B]`, the messages in the order of ranks.
        splits: int64 `[world_size]`, bytes of the message from every rank.
        placements: the placement of every feature's table, as in `encode_ids`.
        rank: the rank of this process.
        world_size: the number of ranks.

    Returns:
        `row_splits` int64 `[S + 1]`, row splits of the samples, ordered by
        source rank, then by feature; `rows` int64 `[n]`, unique local rows of
        every sample, ascending; `weights` float32 `[n]`, or `[0]` if all are 1;
        `served` int64 `[world_size, F]`, samples from every rank for every
        feature, 0 if this rank holds no part of the table; `samples` float32
        `[world_size]`, the argument `samples` of every rank's `encode_ids`.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if a rank has an id out
            of range.
        tf.errors.DataLossError: if a message is malformed.
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
    """Merges lists of ids of a table that this rank holds entirely.

    Args:
        ids: lists, int32 or int64 `[n_i]`.
        row_splits: int64 `[b + 1]` per list.
        weights: float32 `[n_i]` per list, or `[0]` if all weights are 1.
        vocabulary_size: number of rows of the table.
        out_of_range: "error" or "ignore".
        layer: the layer's name, for errors.

    Returns:
        `row_splits` int64 `[b + 1]`, `rows` int64 `[n]`, and `weights` float32
        `[n]`, or `[0]` if all weights are 1.

    Raises:
        tf.errors.InvalidArgumentError: if an id is out of range or inputs are
            malformed.
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
        The unique ids in ascending order, int64 `[u]`, and the index of every
        id among them, int64 `[n]`.

    Raises:
        tf.errors.InvalidArgumentError: if ids are not a vector.
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
    """Rounds numbers to the wire dtype.

    Args:
        x: float32, of any shape.
        dtype: tf.float32 (no rounding), tf.bfloat16 or tf.float16.
        rounding: "nearest" is tf.cast. "stochastic" chooses one of the two
            neighbors in `dtype` such that the expectation is x. Errors of many
            small gradients then cancel and do not accumulate.
        seed: int64 scalar; the random choice depends on the seed and the
            element's index. Not used with "nearest".

    Returns:
        A tensor of `dtype` with the shape of x. NaN stays NaN. Infinity, and
        numbers beyond the range of `dtype`, become infinity. The gradient is
        the upstream gradient as float32.

    Raises:
        ValueError: if `rounding` has another value.
    """
    if not _is_stochastic(rounding, dtype):
        return tf.cast(x, dtype)
    return library().tfdist_round_to_wire(x, tf.cast(seed, tf.int64), T=dtype)


@tf.RegisterGradient("Tfdist>RoundToWire")
def _round_to_wire_gradient(
    _: tf.Operation, grad: tf.Tensor
) -> list[tf.Tensor | None]:
    return [tf.cast(grad, tf.float32), None]


def from_wire(
    x: tf.Tensor,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tf.Tensor:
    """Converts numbers from the wire dtype to float32.

    Args:
        x: float32, bfloat16 or float16, of any shape.
        rounding: the rounding of the gradient, which is sent back, see
            `to_wire`.
        seed: the seed of that rounding.

    Returns:
        float32, with the shape of x. The gradient is the upstream gradient,
        rounded to the dtype of x.

    Raises:
        ValueError: if `rounding` has another value.
    """
    x = tf.convert_to_tensor(x)
    if not _is_stochastic(rounding, x.dtype):
        return tf.cast(x, tf.float32)
    return _widen(x, tf.cast(seed, tf.int64))


@tf.custom_gradient
def _widen(x: tf.Tensor, seed: tf.Tensor) -> WithGradient:
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

    Numbers of similar magnitude share the upper bits of their exponents. 32
    bits become about 27, and 16 bits of bfloat16 about 11 (`number_codec.h`).

    Args:
        values: float32, bfloat16 or float16 `[n]`, ordered by receiver.
        splits: int64 `[receivers]`, the number of values for each receiver.

    Returns:
        The messages, uint8 `[m]`, and their bytes, int64 `[receivers]`.

    Raises:
        tf.errors.InvalidArgumentError: if the sum of `splits` is not n.
    """
    payload, byte_splits = library().tfdist_pack_numbers(values, splits)
    return payload, byte_splits


def unpack_numbers(
    payload: tf.Tensor, byte_splits: tf.Tensor, dtype: tf.DType
) -> tuple[tf.Tensor, tf.Tensor]:
    """Unpacks the result of `pack_numbers`.

    Args:
        payload: uint8 `[m]`, the messages of several senders.
        byte_splits: int64 `[senders]`, their bytes.
        dtype: the dtype of the numbers.

    Returns:
        The numbers, `[n]` of `dtype`, bitwise equal to the packed ones, and
        the number of values from each sender, int64 `[senders]`.

    Raises:
        tf.errors.DataLossError: if a message is malformed.
    """
    values, splits = library().tfdist_unpack_numbers(
        payload, byte_splits, T=dtype
    )
    return values, splits


# Bytes of a number in 8 bits: a block of 64 has a float32 scale.
INT8_BYTES = 1 + 4 / 64


def encode_int8(
    values: tf.Tensor,
    splits: tf.Tensor,
    *,
    rounding: Rounding = "nearest",
    seed: tf.Tensor | int = 0,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Rounds numbers for several receivers to 8 bits.

    Each block of 64 numbers of a receiver has a scale s, its largest finite
    magnitude / 127. A number x is sent as the integer q near x / s.

    Args:
        values: float32 `[n]`, ordered by receiver.
        splits: int64 `[receivers]`, the number of values for each receiver.
        rounding: "nearest", with an error of at most s / 2 (1 + 1e-5), or
            "stochastic": the error is below s (1 + 1e-5), and its expectation
            is zero up to float32 rounding, 1e-7 s.
        seed: int64 scalar; the random choice depends on the seed and the
            element's index. Not used with "nearest".

    Returns:
        The messages, uint8 `[m]`, and their bytes, int64 `[receivers]`. NaN
        and infinity become NaN. Blocks of numbers below 1.5e-36 become zeros.

    Raises:
        tf.errors.InvalidArgumentError: if the sum of `splits` is not n.
        ValueError: if `rounding` has another value.
    """
    checks.one_of("rounding", rounding, checks.ROUNDINGS, "numbers on a wire")
    payload, byte_splits = library().tfdist_encode_int8(
        values,
        splits,
        tf.cast(seed, tf.int64),
        at_random=rounding == "stochastic",
    )
    return payload, byte_splits


def decode_int8(
    payload: tf.Tensor, byte_splits: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Reads the result of `encode_int8`.

    Args:
        payload: uint8 `[m]`, the messages of several senders.
        byte_splits: int64 `[senders]`, their bytes.

    Returns:
        The numbers, float32 `[n]`, and the number of values from each sender,
        int64 `[senders]`.

    Raises:
        tf.errors.DataLossError: if a message is malformed.
    """
    values, splits = library().tfdist_decode_int8(payload, byte_splits)
    return values, splits
