# SPDX-License-Identifier: Apache-2.0
"""Gradients of table rows that a rank holds back and sends to owners later.

The gradient of a lookup is usually sent back through its exchange in the same
step. Here it becomes the gradient of rows of the entire table on the rank that
has looked them up. Gradients of several steps are added up by row there, and
`sent_to_owners` sends each row once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import exchange
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.keras_internals import value_of
from tfdist_ext.ops import lookup_ops
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Variable

# Label of the exchanges of rows and of their gradients.
LABEL = "consistency/rows"

_OTHERWISE = "Or use BSP() or LocalSteps(k), which send them in every step."


def check(features: Sequence[Feature]) -> None:
    """Refuses features whose gradients cannot be deferred.

    Args:
        features: features of partitioned tables.

    Raises:
        ValueError: rows of a table may get other keys, or are on GPUs.
    """
    for feature in features:
        if feature.keys is not None and feature.keys.config.reuses_rows:
            raise ValueError(
                f"Table '{feature.spec.table}' gives the rows of evicted keys "
                "to new keys, so a gradient that waits on a rank, as with "
                "LocalSteps(tables=True) and ASP, could reach the row of "
                "another key. Leave out `evict` and `steps_to_live`. "
                f"{_OTHERWISE}"
            )
        if feature.spec.storage == "device":
            raise ValueError(
                f"Table '{feature.spec.table}' has storage='device'. "
                "LocalSteps(tables=True) and ASP keep gradients of tables in "
                f"the memory of hosts only. Use storage='host'. {_OTHERWISE}"
            )


def deferring(
    look_up: Callable[[], list[tf.Tensor]],
    lists: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    scale: tf.Tensor,
    wire: Wire,
    counts: Sequence[Callable[[], None]] = (),
) -> list[tf.Tensor]:
    """Looks up rows such that their gradients stay on this rank.

    Args:
        look_up: function that returns per feature float32 `[b, dim]`.
        lists: per feature, the lists whose sums of rows it returns.
        features: the features that are looked up.
        tables: variables, this rank's part of each table.
        scale: float32 scalar, the factor of this rank's gradients. If it is
            0, the gradient is zero, even if the upstream gradient is NaN.
        wire: the wire format of the gradients.
        counts: functions that are called where the gradient is computed.

    Returns:
        The result of `look_up`. The gradient of a table is a
        `tf.IndexedSlices` of unique, ascending rows of the entire table,
        marked as deferred.
    """
    results = unrecorded(look_up)
    used = exchange.used_tables(features)

    def gradient(*upstream: tf.Tensor) -> list[Gradient]:
        for count in counts:
            count()
        scaled = [tf.math.multiply_no_nan(each, scale) for each in upstream]
        return _gradient(scaled, lists, features, used, wire)

    natives = [value_of(tables[table]) for table in used]
    internals.record_gradient(results, natives, gradient)
    return results


def unrecorded(look_up: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Looks up rows whose gradient the caller tells tapes.

    A tape of another function would not know it, which is an error.
    """
    with internals.not_recording():
        return [
            tf.raw_ops.PreventGradient(
                input=each,
                message="the gradient of a lookup stays on its rank "
                "in this mode of `consistency`, and only a tape in the same "
                "function knows it. Call the layer and the tape in one "
                "tf.function.",
            )
            for each in look_up()
        ]


def _gradient(
    upstream: Sequence[tf.Tensor],
    lists: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    used: Sequence[int],
    wire: Wire,
) -> list[tf.IndexedSlices]:
    """Gradients of tables, from those of sums of their rows.

    Args:
        upstream: per feature float32 `[b, dim]`.
        lists: per feature, the lists whose rows were summed.
        features: the features that were looked up.
        used: indices of the tables.
        wire: the wire format of the gradients.
    """
    specs = [
        next(each.spec for each in features if each.table == table)
        for table in used
    ]
    owned = exchange.merge(lists, features)
    with tf.device("CPU:0"):
        rows, sums = lookup_ops.lookup_grad(
            owned.row_splits,
            owned.rows,
            owned.weights,
            owned.served,
            tf.concat([tf.reshape(each, [-1]) for each in upstream], 0),
            feature_tables=[used.index(each.table) for each in features],
            table_shapes=[(spec.rows, spec.dim) for spec in specs],
        )
    return [
        deferred_slices(of_table, values, spec, wire)
        for of_table, values, spec in zip(rows, sums, specs, strict=True)
    ]


def deferred_slices(
    rows: tf.Tensor, values: tf.Tensor, spec: ShardSpec, wire: Wire
) -> tf.IndexedSlices:
    """A gradient of rows of an entire table, marked as deferred.

    Args:
        rows: int64 `[n]`, rows of the entire table.
        values: float32 `[n, dim]`, their gradients.
        spec: this rank's shard of the table.
        wire: the wire format in which they are to be sent.
    """
    shape = (spec.rows, spec.dim)
    slices = lookup_ops.unique_slices(values, rows, shape, spec)
    marks.set_deferred_rows(slices.dense_shape, wire)
    return slices


def sent_to_owners(
    pairs: Sequence[tuple[tf.IndexedSlices, Variable]],
    collectives: Collectives,
) -> list[tuple[tf.IndexedSlices, Variable]]:
    """Sends deferred gradients to the owners of the rows; all ranks must call.

    Args:
        pairs: deferred gradients with unique rows, and the shards of their
            tables, in the same order on all ranks.
        collectives: the strategy's collectives.

    Returns:
        For each pair the gradient of this rank's shard, summed over the
        ranks, and the shard.
    """
    groups: dict[Wire, list[int]] = {}
    for place, (slices, _) in enumerate(pairs):
        groups.setdefault(marks.deferred_rows(slices), []).append(place)
    result = list(pairs)
    for wire, places in groups.items():
        found = _sent([pairs[i] for i in places], wire, collectives)
        for i, slices in zip(places, found, strict=True):
            result[i] = (slices, pairs[i][1])
    return result


def chosen_slices(
    slices: tf.IndexedSlices, rows: tf.Tensor
) -> tf.IndexedSlices:
    """Some rows of a gradient with ascending rows, which has all of them."""
    places = tf.searchsorted(slices.indices, rows)
    # The same `dense_shape` tensor, which carries the marks of the gradient.
    return tf.IndexedSlices(
        tf.gather(slices.values, places), rows, slices.dense_shape
    )


def norms_of_rows(
    pairs: Sequence[tuple[tf.IndexedSlices, Variable]],
    collectives: Collectives,
) -> list[tf.Tensor]:
    """Asks the owners of rows for their norms; all ranks must call.

    Args:
        pairs: deferred gradients, of whose rows the norms are asked, and the
            shards of their tables, in the same order on all ranks.
        collectives: the strategy's collectives.

    Returns:
        For each pair float32 `[n]`, norms of rows of the entire table.
    """
    if not pairs:
        return []
    label = f"{LABEL}/norms"
    features = _features(pairs)
    owned, route = _asked(pairs, features, collectives, label)
    ranks, count = collectives.group.world_size, len(features)
    of_rows = tf.repeat(
        tf.tile(tf.range(count), [ranks]), tf.reshape(owned.served, [-1])
    )
    with tf.device("CPU:0"), sharded_variable.reads_allowed():
        squares = [
            tf.reduce_sum(
                tf.square(tf.cast(tf.gather(value_of(v), rows), tf.float32)), 1
            )
            for (_, v), rows in zip(
                pairs,
                tf.dynamic_partition(owned.rows, of_rows, count),
                strict=True,
            )
        ]
    places = tf.dynamic_partition(tf.range(tf.size(of_rows)), of_rows, count)
    found, _ = collectives.all_to_all(
        tf.dynamic_stitch(places, squares),
        tf.reduce_sum(owned.served, axis=1),
        label,
    )
    # Ranks that hold columns of a row have answered parts of its square.
    samples = route.samples
    starts = tf.tile(tf.cumsum(samples, exclusive=True), [ranks])
    starts = tf.repeat(starts, tf.reshape(route.sample_splits, [-1]))
    totals = tf.math.unsorted_segment_sum(
        found,
        starts + tf.cast(route.sample_ids, tf.int64),
        tf.reduce_sum(samples),
    )
    return tf.split(tf.sqrt(totals), samples, num=count)


def _features(
    pairs: Sequence[tuple[tf.IndexedSlices, Variable]],
) -> list[Feature]:
    specs = [marks.gradient_spec(slices) for slices, _ in pairs]
    return [
        Feature(spec.table, table, spec)
        for table, spec in enumerate(specs)
        if spec is not None
    ]


def _asked(
    pairs: Sequence[tuple[tf.IndexedSlices, Variable]],
    features: Sequence[Feature],
    collectives: Collectives,
    label: str,
) -> tuple[exchange.OwnedIds, exchange.Route]:
    """Tells the owners which rows a rank has."""
    return exchange.input_dist(
        [[exchange.each_alone(slices.indices)] for slices, _ in pairs],
        features,
        collectives,
        label,
        tf.constant(1.0),
    )


def _sent(
    pairs: Sequence[tuple[tf.IndexedSlices, Variable]],
    wire: Wire,
    collectives: Collectives,
) -> list[tf.IndexedSlices]:
    features = _features(pairs)
    ranks = collectives.group.world_size
    owned, route = _asked(pairs, features, collectives, LABEL)
    parts = lookup_ops.parts_of_gradient(
        [slices.values for slices, _ in pairs],
        route.sample_ids,
        route.sample_splits,
        placements=[feature.placement for feature in features],
        world_size=ranks,
    )
    counts = exchange.values_by_owner(route.sample_splits, features)
    received = exchange.sent(parts, counts, collectives, wire, LABEL)
    shapes = [feature.spec.local_shape for feature in features]
    with tf.device("CPU:0"):
        rows, sums = lookup_ops.lookup_grad(
            owned.row_splits,
            owned.rows,
            owned.weights,
            owned.served,
            received,
            feature_tables=list(range(len(features))),
            table_shapes=shapes,
        )
    return [
        lookup_ops.unique_slices(values, of_table, shape, feature.spec)
        for of_table, values, shape, feature in zip(
            rows, sums, shapes, features, strict=True
        )
    ]
