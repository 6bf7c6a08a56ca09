# SPDX-License-Identifier: Apache-2.0
"""The stages of a lookup: input_dist, lookup, output_dist.

`input_dist` sends ids to the owners of their rows, `lookup` sums the rows, and
`output_dist` sends the sums back. Unpartitioned tables need no exchange.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Variable
from tfdist_ext.type_names import WithGradient

# More than the rows of any table. Ids are shifted by it while duplicates are
# removed, so that bad ids, also negative ones, pass. The exchange reports them.
_SHIFT = 1 << 40


@dataclasses.dataclass(frozen=True)
class Pooling:
    """How the results of samples are summed from unique rows.

    Attributes:
        row_splits: int64 `[b + 1]`, row splits of the batch's samples.
        positions: int64 `[n]`, indices of unique rows.
        weights: float32 `[n]`, or `[0]` if all weights are 1.
    """

    row_splits: tf.Tensor
    positions: tf.Tensor
    weights: tf.Tensor


def ask_once(lists: Sequence[Ids], feature: Feature) -> tuple[Ids, Pooling]:
    """Returns the unique ids of a batch, as lists of one id each.

    Args:
        lists: the lists whose results are summed.
        feature: the feature that is looked up.

    Returns:
        The unique ids, and how to sum their rows for each sample.
    """
    ignore = feature.out_of_range == "ignore"
    values = [tf.cast(part.values, tf.int64) for part in lists]
    row_splits, ids, weights = id_ops.merge_ids(
        values if ignore else [_shifted(ids) for ids in values],
        [part.row_splits for part in lists],
        [part.weights for part in lists],
        vocabulary_size=feature.spec.rows if ignore else 2 * _SHIFT,
        out_of_range=feature.out_of_range,
        layer=feature.name,
    )
    unique, positions = id_ops.unique_ids(ids)
    if not ignore:
        unique -= _SHIFT
    return each_alone(unique), Pooling(row_splits, positions, weights)


def each_alone(ids: tf.Tensor) -> Ids:
    """Lists of one id each; `ids` is `[n]`."""
    splits = tf.range(tf.size(ids, tf.int64) + 1, dtype=tf.int64)
    return Ids(ids, splits, tf.zeros([0]))


def _shifted(ids: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(ids, -_SHIFT, _SHIFT - 1) + _SHIFT


def pool(rows: tf.Tensor, pooling: Pooling) -> tf.Tensor:
    """Sums unique rows `[u, dim]` for each sample; float32 `[b, dim]`."""
    return lookup_ops.pool(
        rows, pooling.row_splits, pooling.positions, pooling.weights
    )


def combine(
    sums: tf.Tensor, lists: Sequence[Ids], feature: Feature
) -> tf.Tensor:
    """Divides sums of weighted rows according to the feature's combiner.

    As in `tf.nn.embedding_lookup_sparse`, "mean" divides by the sum of the
    weights, and "sqrtn" by the square root of the sum of their squares. The
    results of samples without ids stay zero.

    Args:
        sums: float32 `[b, dim]`.
        lists: the ids whose rows were summed.
        feature: the feature, with its combiner and `out_of_range`.

    Returns:
        The combined rows, float32 `[b, dim]`.
    """
    if feature.combiner == "sum":
        return sums
    squared = feature.combiner == "sqrtn"
    totals = tf.add_n([_weight_sums(ids, feature, squared) for ids in lists])
    divisors = tf.sqrt(totals) if squared else totals
    return tf.math.divide_no_nan(sums, divisors[:, tf.newaxis])


def _weight_sums(ids: Ids, feature: Feature, squared: bool) -> tf.Tensor:
    """Sums the weights, or their squares, of every sample's ids."""
    # A key without a row counts: its row is zeros.
    drops = feature.out_of_range == "ignore" and feature.keys is None

    def of_ones() -> tf.Tensor:
        return tf.cast(ids.row_splits[1:] - ids.row_splits[:-1], tf.float32)

    def of_weights() -> tf.Tensor:
        count = tf.size(ids.values)
        weights = tf.concat(
            [ids.weights, tf.ones([count - tf.size(ids.weights)])], 0
        )
        if squared:
            weights = tf.square(weights)
        if drops:
            values = tf.cast(ids.values, tf.int64)
            known = (values >= 0) & (values < feature.spec.rows)
            weights = tf.where(known, weights, 0.0)
        ragged = tf.RaggedTensor.from_row_splits(
            weights, ids.row_splits, validate=False
        )
        return tf.reduce_sum(ragged, axis=1)

    if drops:
        return of_weights()
    if ids.weights.shape.num_elements() == 0:
        return of_ones()
    return tf.cond(tf.size(ids.weights) > 0, of_weights, of_ones)


@dataclasses.dataclass(frozen=True)
class OwnedIds:
    """Rows of the local shards that the samples of all ranks look up.

    Entries are ordered by requesting rank, then by feature, then by sample.

    Attributes:
        row_splits: int64 `[s + 1]`, row splits of the s samples.
        rows: int64 `[n]`, rows of the local shards.
        weights: float32 `[n]`, or `[0]` if all weights are 1.
        served: int64 `[world_size, features]`, the number of samples of each
            rank and feature.
    """

    row_splits: tf.Tensor
    rows: tf.Tensor
    weights: tf.Tensor
    served: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Route:
    """The samples that results from each owner belong to.

    Attributes:
        samples: int64 `[features]`, the number of samples in this rank's batch.
        sample_ids: int32 `[m]`, this rank's samples that have ids at an owner,
            grouped by owner and feature.
        sample_splits: int64 `[world_size, features]`, the number of these
            samples for each owner and feature.
        gradient_scale: float32 scalar, the factor of this rank's gradients.
    """

    samples: tf.Tensor
    sample_ids: tf.Tensor
    sample_splits: tf.Tensor
    gradient_scale: tf.Tensor


def join_lists(lists: Sequence[Ids]) -> Ids:
    """Concatenates lists of ids along the samples."""
    if len(lists) == 1:
        return lists[0]
    rows = [each.values for each in lists]
    ends = tf.cumsum(tf.stack([tf.size(part, tf.int64) for part in rows]))
    shifted = [
        each.row_splits[1:] + ends[i - 1] if i else each.row_splits
        for i, each in enumerate(lists)
    ]
    weights = _join_weights([each.weights for each in lists], rows)
    return Ids(tf.concat(rows, 0), tf.concat(shifted, 0), weights)


def _join_weights(
    weights: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]
) -> tf.Tensor:
    """Concatenates weights; the result is empty if all weights are 1."""
    given = tf.add_n([tf.size(part) for part in weights])

    def with_ones() -> tf.Tensor:
        # A list without weights gets a weight of 1 for each of its rows.
        missing = [
            tf.size(r) - tf.size(w) for w, r in zip(weights, rows, strict=True)
        ]
        return tf.concat(
            [
                tf.concat([part, tf.ones([count])], 0)
                for part, count in zip(weights, missing, strict=True)
            ],
            0,
        )

    return tf.cond(given > 0, with_ones, lambda: tf.zeros([0]))


def input_dist(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    collectives: Collectives,
    label: str,
    weight: tf.Tensor | None = None,
) -> tuple[OwnedIds, Route]:
    """Sends the batch's ids to the owners of their rows, in one exchange.

    Args:
        ids: per feature, the lists whose results are summed.
        features: the features, with the placements of their tables.
        collectives: the strategy's collectives.
        label: the name of the exchange in errors.
        weight: float32 scalar, the weight of this rank in the average of
            gradients; None uses its samples in the step.

    Returns:
        The rows that this rank must look up, and the return route.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if an id on any rank
            is out of range and its feature's `out_of_range` is "error".
    """
    step = collectives.step
    group = collectives.group
    where: Keywords = {
        "placements": [feature.placement for feature in features],
        "rank": group.rank,
        "world_size": group.world_size,
    }
    samples = tf.stack(
        [tf.size(lists[0].row_splits, tf.int64) - 1 for lists in ids]
    )
    if weight is None:
        weight = tf.cast(samples[0], tf.float32)
        if step is not None:
            weight = collectives.samples()
    # Equal on all ranks: the tables of an exchange have the same storage.
    on_gpu = any(feature.spec.storage == "device" for feature in features)
    payload, splits, sample_ids, sample_splits = encode(
        ids, features, weight, on_gpu, where
    )
    message, splits = collectives.all_to_all(payload, splits, f"{label}/ids")
    # Ids are decoded where rows are looked up; TensorFlow would choose a GPU.
    with contextlib.nullcontext() if on_gpu else tf.device("CPU:0"):
        row_splits, rows, weights, served, shares = id_ops.decode_ids(
            message, splits, **where
        )
    scale = _gradient_scale(step, shares, group.rank)
    return (
        OwnedIds(row_splits, rows, weights, served),
        Route(samples, sample_ids, sample_splits, scale),
    )


def encode(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    weight: tf.Tensor,
    in_blocks: bool,
    where: Keywords,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """Encodes the ids of a batch; see `input_dist`, `id_ops.encode_ids`."""
    flat = [part for lists in ids for part in lists]
    values = [part.values for part in flat]
    if len({each.dtype for each in values}) > 1:
        values = [tf.cast(each, tf.int64) for each in values]
    return id_ops.encode_ids(
        values,
        [part.row_splits for part in flat],
        [part.weights for part in flat],
        weight,
        list_features=[f for f, lists in enumerate(ids) for _ in lists],
        out_of_range=[feature.out_of_range for feature in features],
        unique=[feature.unique for feature in features],
        in_blocks=in_blocks,
        **where,
    )


def _gradient_scale(
    step: Step | None, shares: tf.Tensor, rank: int
) -> tf.Tensor:
    """Returns this rank's share of samples if ranks are averaged, else 1."""
    if step is None or not step.weighted:
        return tf.constant(1.0)
    return tf.math.divide_no_nan(shares[rank], tf.reduce_sum(shares))


def lookup(
    tables: Sequence[Variable], features: Sequence[Feature], ids: OwnedIds
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the weighted rows of all samples, from all tables in one op.

    Args:
        tables: variables of shape `local_shape`.
        features: the features, with the indices of their tables.
        ids: rows and weights from `input_dist`.

    Returns:
        The sums, concatenated in the order of `ids`, float32 `[v]`, and the
        number of these values for each requesting rank, int64 `[world_size]`.
    """
    used = used_tables(features)
    return lookup_ops.lookup(
        [tables[index] for index in used],
        ids.row_splits,
        ids.rows,
        ids.weights,
        ids.served,
        feature_tables=[used.index(feature.table) for feature in features],
    )


def used_tables(features: Sequence[Feature]) -> list[int]:
    """Ascending indices of the tables that features are looked up in."""
    return sorted({feature.table for feature in features})


def output_dist(
    values: tf.Tensor,
    send_splits: tf.Tensor,
    route: Route,
    features: Sequence[Feature],
    collectives: Collectives,
    wire: Wire,
) -> list[tf.Tensor]:
    """Sends results back and joins the parts of each sample.

    The gradient is sent in the opposite direction, in the same wire dtype.

    Args:
        values: float32 `[v]`, from `lookup`.
        send_splits: int64 `[world_size]`, from `lookup`.
        route: the return route, from `input_dist`.
        features: the features that were looked up.
        collectives: the strategy's collectives.
        wire: the wire format of the results.

    Returns:
        Per feature the sums, float32 `[b, dim]`; zeros for samples without ids.
    """
    parts = sent(
        values, send_splits, collectives, wire, f"{wire.label}/results"
    )
    return join(parts, route, features, collectives)


def join(
    parts: tf.Tensor,
    route: Route,
    features: Sequence[Feature],
    collectives: Collectives,
) -> list[tf.Tensor]:
    """Joins the parts of each sample that the owners have sent.

    Args:
        parts: float32 `[v]`, the results of all owners.
        route: see `output_dist`; so are the other arguments and the result.
        features: the features that were looked up.
        collectives: the strategy's collectives.
    """
    return lookup_ops.join_parts(
        parts,
        route.sample_ids,
        route.sample_splits,
        route.samples,
        route.gradient_scale,
        placements=[feature.placement for feature in features],
        world_size=collectives.group.world_size,
    )


def values_by_owner(
    sample_splits: tf.Tensor, features: Sequence[Feature]
) -> tf.Tensor:
    """The number of values of samples for each owner, int64 `[world_size]`.

    Args:
        sample_splits: see `Route`.
        features: the features that are looked up.
    """
    columns = [
        [feature.spec.at(rank).local_dim for feature in features]
        for rank in range(sample_splits.shape[0])
    ]
    return tf.reduce_sum(sample_splits * tf.constant(columns, tf.int64), axis=1)


def sent(
    values: tf.Tensor,
    send_splits: tf.Tensor,
    collectives: Collectives,
    wire: Wire,
    label: str,
) -> tf.Tensor:
    """Sends numbers to the ranks in the wire format.

    Args:
        values: float32 `[v]`, the numbers for each rank, in their order.
        send_splits: int64 `[world_size]`, the numbers for each rank.
        collectives: the strategy's collectives.
        wire: the wire format of the numbers and of their gradient.
        label: the name of the exchange in errors.

    Returns:
        float32, the numbers that this rank received.
    """
    seed, gradient_seed = wire.seeds(collectives.group.rank)
    if wire.dtype == "int8":

        def encode(
            numbers: tf.Tensor, splits: tf.Tensor, backward: bool
        ) -> tuple[tf.Tensor, tf.Tensor]:
            return id_ops.encode_int8(
                numbers,
                splits,
                rounding=wire.rounding,
                seed=gradient_seed if backward else seed,
            )

        return _coded_all_to_all(
            values, send_splits, collectives, label, encode, id_ops.decode_int8
        )
    numbers = id_ops.to_wire(
        values,
        tf.as_dtype(wire.dtype),
        rounding=wire.rounding,
        seed=seed,
    )
    if wire.packed:
        parts = _coded_all_to_all(
            numbers,
            send_splits,
            collectives,
            label,
            lambda values, splits, _: id_ops.pack_numbers(values, splits),
            lambda payload, sizes: id_ops.unpack_numbers(
                payload, sizes, numbers.dtype
            ),
        )
    else:
        parts, _ = collectives.all_to_all(numbers, send_splits, label)
    return id_ops.from_wire(parts, rounding=wire.rounding, seed=gradient_seed)


_Coded = tuple[tf.Tensor, tf.Tensor]


def _coded_all_to_all(
    numbers: tf.Tensor,
    send_splits: tf.Tensor,
    collectives: Collectives,
    label: str,
    encode: Callable[[tf.Tensor, tf.Tensor, bool], _Coded],
    decode: Callable[[tf.Tensor, tf.Tensor], _Coded],
) -> tf.Tensor:
    """Exchanges numbers as bytes, and their gradient in the same way.

    Args:
        numbers: the numbers, `[n]`.
        send_splits: int64 `[world_size]`, the numbers for each rank.
        collectives: the strategy's collectives.
        label: the name of the exchange in errors.
        encode: returns the messages to all ranks, and their bytes; the last
            argument says whether the numbers are the gradient.
        decode: returns the numbers in messages, and their count by rank.
    """

    def exchange(
        values: tf.Tensor, splits: tf.Tensor, label: str, backward: bool
    ) -> _Coded:
        payload, sizes = encode(values, splits, backward)
        return decode(*collectives.all_to_all(payload, sizes, label))

    @tf.custom_gradient
    def differentiable(values: tf.Tensor) -> WithGradient:
        parts, splits = exchange(values, send_splits, label, False)

        def grad(upstream: tf.Tensor) -> tf.Tensor:
            return exchange(upstream, splits, f"{label}/gradient", True)[0]

        return parts, grad

    return differentiable(numbers)


def local_lookup(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
) -> list[tf.Tensor]:
    """Sums the rows of every sample and feature, without an exchange.

    Args:
        ids: per feature, the lists whose results are summed.
        features: the features that are looked up.
        tables: variables of entire tables.

    Returns:
        Per feature the sums, float32 `[b, dim]`.
    """
    owned = merge(ids, features)
    values, _ = lookup(tables, features, owned)
    return _split(values, owned, features)


def merge(
    ids: Sequence[Sequence[Ids]], features: Sequence[Feature]
) -> OwnedIds:
    """Checks and merges the ids of unpartitioned tables.

    Args:
        ids: per feature, the lists whose results are summed.
        features: the features that are looked up.
    """
    merged = [
        id_ops.merge_ids(
            [part.values for part in lists],
            [part.row_splits for part in lists],
            [part.weights for part in lists],
            vocabulary_size=feature.spec.rows,
            out_of_range=feature.out_of_range,
            layer=feature.name,
        )
        for lists, feature in zip(ids, features, strict=True)
    ]
    lists = [Ids(rows, splits, weights) for splits, rows, weights in merged]
    served = [tf.size(each.row_splits, tf.int64) - 1 for each in lists]
    joined = join_lists(lists)
    return OwnedIds(
        joined.row_splits,
        joined.values,
        joined.weights,
        tf.stack(served)[tf.newaxis],
    )


def _split(
    values: tf.Tensor, ids: OwnedIds, features: Sequence[Feature]
) -> list[tf.Tensor]:
    """Splits the results of unpartitioned tables by feature.

    Args:
        values: float32 `[v]`, from `lookup`.
        ids: the ids that were looked up.
        features: the features of the results.

    Returns:
        Per feature the sums, float32 `[b, dim]`.
    """
    dims = [feature.spec.dim for feature in features]
    if len(dims) == 1:
        return [tf.reshape(values, [-1, dims[0]])]
    sizes = ids.served[0] * tf.constant(dims, tf.int64)
    parts = tf.split(values, sizes, num=len(dims))
    return [
        tf.reshape(part, [-1, dim])
        for part, dim in zip(parts, dims, strict=True)
    ]
