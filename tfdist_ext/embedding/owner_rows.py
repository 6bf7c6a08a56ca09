# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of rows that their owners serve at any time.

With `consistency.SSP` and `BAP` a rank does not wait until all ranks look up.
It sends its ids to the owners of the rows, a thread of each owner replies with
sums of rows, and later applies the gradients of these sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.calls import RowGradient
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.requests import Place
from tfdist_ext.comm.requests import Updates
from tfdist_ext.embedding import deferred_rows
from tfdist_ext.embedding import exchange
from tfdist_ext.embedding.exchange import OwnedIds
from tfdist_ext.embedding.exchange import Route
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.row_copies import Age
from tfdist_ext.embedding.row_copies import Found
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import request_ops  # registers the op
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import spec_from_json
from tfdist_ext.tables.placement import spec_to_json
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Variable

assert request_ops

_LENGTH = 8  # bytes of the length of ids


class OwnerRows:
    """The rows of this rank that one lookup of a step asks for.

    Args:
        place: kind of the requests.
        features: features that are looked up.
        tables: variables, this rank's part of each table.
        wire: wire format of the replies.
        collectives: collectives of the strategy.

    Attributes:
        place: see the arguments.
        updates: updates that the rows have had. A rank knows those before its
            last lookup.
    """

    def __init__(
        self,
        place: Place,
        features: Sequence[Feature],
        tables: Sequence[Variable],
        wire: Wire,
        collectives: Collectives,
    ) -> None:
        self.place = place
        self._tables = tables
        self._features = features
        self._wire = wire
        group = collectives.group
        self._ranks = group.world_size
        self.where: Keywords = {
            "placements": [feature.placement for feature in features],
            "rank": group.rank,
            "world_size": group.world_size,
        }
        self.updates = Updates(self._ranks)
        with tf.init_scope():
            empty = self._empty_messages()
            self._empty = tf.concat(empty, 0)
            self._sizes = np.array([each.shape[0] for each in empty])
        # The last message of each rank, as a serialized tensor.
        self._messages = local_variable(
            lambda: tf.fill([self._ranks], ""), "messages"
        )

    def _empty_messages(self) -> list[tf.Tensor]:
        """Messages without ids, of each rank to this one."""
        of_rank = dict(self.where)
        rank = of_rank.pop("rank")
        nothing = tf.zeros([0], tf.int64)
        lists = range(len(self._features))
        messages = []
        for source in range(self._ranks):
            payload, splits, _, _ = id_ops.encode_ids(
                [nothing for _ in lists],
                [tf.zeros([1], tf.int64) for _ in lists],
                [tf.zeros([0]) for _ in lists],
                tf.zeros([]),
                rank=source,
                list_features=list(lists),
                out_of_range=[each.out_of_range for each in self._features],
                unique=[each.unique for each in self._features],
                **of_rank,
            )
            messages.append(tf.split(payload, splits, num=self._ranks)[rank])
        return messages

    def serves(
        self, features: Sequence[Feature], tables: Sequence[Variable]
    ) -> bool:
        """Whether this object serves the lookup of another trace as well."""
        pairs = zip(tables, self._tables, strict=True)
        same = list(features) == list(self._features)
        return same and all(one is other for one, other in pairs)

    def answer(
        self, peer: tf.Tensor, message: tf.Tensor, seed: tf.Tensor
    ) -> tf.Tensor:
        """Sums the rows that a rank asks for; a handler of `Requests`."""
        self.updates.set_known(peer)
        tf.raw_ops.ResourceScatterUpdate(
            resource=self._messages.handle,
            indices=peer,
            updates=tf.io.serialize_tensor(message),
        )
        values, _ = exchange.lookup(
            self._tables, self._features, self._owned(peer, message)
        )
        return id_ops.to_wire(
            values,
            self.place.dtype,
            rounding=self._wire.rounding,
            seed=seed,
        )

    def _owned(self, peer: tf.Tensor, message: tf.Tensor) -> OwnedIds:
        """The ids of a rank's message; the other ranks ask for nothing."""
        ends = np.cumsum(self._sizes)
        with tf.device("CPU:0"):
            before = self._empty[: tf.gather(ends - self._sizes, peer)]
            after = self._empty[tf.gather(ends, peer) :]
            own = tf.range(self._ranks, dtype=tf.int64) == peer
            row_splits, rows, weights, served, _ = id_ops.decode_ids(
                tf.concat([before, message, after], 0),
                tf.where(own, tf.size(message, tf.int64), self._sizes),
                **self.where,
            )
        return OwnedIds(row_splits, rows, weights, served)

    def gradients(
        self, peer: tf.Tensor, ids: tf.Tensor, replies: tf.Tensor
    ) -> list[tf.IndexedSlices]:
        """Gradients of this rank's tables from those of a rank's replies.

        Args:
            peer: the rank, int64 scalar.
            ids: uint8 `[bytes]`, ids of the lookup, see `last_ids`.
            replies: uint8 `[bytes]`, gradients of the replies.
        """
        owned = self._owned(peer, ids)
        used = exchange.used_tables(self._features)
        size = self.place.dtype.size
        values = tf.bitcast(tf.reshape(replies, [-1, size]), self.place.dtype)
        return lookup_ops.row_gradients(
            self.tables_of_gradients(),
            owned.row_splits,
            owned.rows,
            owned.weights,
            owned.served,
            tf.cast(values, tf.float32),
            feature_tables=[used.index(each.table) for each in self._features],
        )

    def take_waiting(
        self, collectives: Collectives
    ) -> list[tuple[tf.Tensor, tf.Tensor]]:
        """Ids and gradients that wait, by feature; they are forgotten here."""
        copies = collectives.row_copies
        assert copies is not None
        return [
            copies.take_gradients(feature, self._tables[feature.table])
            if _has_copies(feature)
            else (tf.zeros([0], tf.int64), tf.zeros([0, feature.spec.dim]))
            for feature in self._features
        ]

    def waiting_gradients(self, collectives: Collectives) -> RowGradient:
        """The gradients that wait, to be sent now; they are forgotten here."""
        waiting = self.take_waiting(collectives)
        return _gradient_with_ids(
            [sums for _, sums in waiting],
            [[exchange.each_alone(ids)] for ids, _ in waiting],
            *(self._features, tf.zeros([]), self, self._wire),
        )

    def tables_of_gradients(self) -> list[Variable]:
        """The tables that `gradients` returns the gradients of, in order."""
        return [self._tables[i] for i in exchange.used_tables(self._features)]

    def last_ids(self, peer: tf.Tensor) -> tf.Tensor:
        """The ids of a rank's last lookup, see `gradients`."""
        message = tf.gather(self._messages.read_value(), peer)
        return tf.ensure_shape(tf.io.parse_tensor(message, tf.uint8), [None])


def message_of(gradient: RowGradient) -> tuple[tf.Tensor, tf.Tensor]:
    """Messages with a gradient and ids, if it has any, and bytes by owner."""
    values = tf.reshape(tf.bitcast(gradient.values, tf.uint8), [-1])
    value_bytes = gradient.splits * gradient.values.dtype.size
    if gradient.ids is None:
        return values, value_bytes
    ids, id_bytes = gradient.ids
    ranks = gradient.splits.shape[0]
    lengths = tf.bitcast(id_bytes, tf.uint8)
    parts = zip(
        tf.unstack(lengths, ranks),
        tf.split(ids, id_bytes, num=ranks),
        tf.split(values, value_bytes, num=ranks),
        strict=True,
    )
    payload = tf.concat([each for of_rank in parts for each in of_rank], 0)
    return payload, _LENGTH + id_bytes + value_bytes


def ids_and_values(message: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The ids and the gradients in a message to one owner; see `message_of`."""
    size = tf.bitcast(message[:_LENGTH], tf.int64)
    return message[_LENGTH : _LENGTH + size], message[_LENGTH + size :]


def look_up_at_owners(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    collectives: Collectives,
    wire: Wire,
) -> list[tf.Tensor]:
    """Sums of rows as their owners have them now, or had when they were copied.

    Args:
        ids: per feature, the lists whose results are summed.
        features: features that are looked up.
        tables: variables, this rank's part of each table.
        collectives: collectives of the strategy.
        wire: wire format of the replies.

    Returns:
        Per feature float32 `[b, dim]`.

    Raises:
        ValueError: a feature or the wire format needs all ranks at once.
    """
    if collectives.row_copies is None:
        parts, route, _ = _ask(ids, features, tables, collectives, wire)
        return exchange.join(parts, route, features, collectives)
    return _look_up_with_copies(ids, features, tables, collectives, wire)


def _look_up_with_copies(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    collectives: Collectives,
    wire: Wire,
) -> list[tf.Tensor]:
    """Asks only for rows of which this rank has no copy, or an old one.

    Gradients of rows with copies wait. All gradients are sent with their ids.
    """
    requests = collectives.requests
    assert requests is not None and requests.bound is not None
    # Read before the owners answer: rows may have had later updates as well.
    now, own = requests.oldest_clock(), requests.steps.read_value()
    age = Age(now, own - requests.bound, own, own - requests.delay)
    found: dict[int, Found] = {
        i: collectives.row_copies.find(
            ids[i][0].values, feature, tables[feature.table], age
        )
        for i, feature in enumerate(features)
        if _has_copies(feature)
    }
    asked = [
        [exchange.each_alone(found[i].missing)] if i in found else lists
        for i, lists in enumerate(ids)
    ]
    with internals.not_recording(), tf.control_dependencies([now]):
        parts, route, owner = _ask(asked, features, tables, collectives, wire)

    def look_up() -> list[tf.Tensor]:
        results = exchange.join(parts, route, features, collectives)
        for index, each in found.items():
            results[index] = each.complete(results[index])
        return results

    results = deferred_rows.unrecorded(look_up)
    variables = owner.tables_of_gradients()
    step, samples = collectives.step, collectives.samples()
    assert step is not None

    def gradient(*upstream: tf.Tensor) -> list[Gradient]:
        scale = route.gradient_scale
        values = [tf.math.multiply_no_nan(each, scale) for each in upstream]
        lists = list(ids)
        for i, each in found.items():
            each.count()
            due, values[i] = each.add(values[i])
            lists[i] = [exchange.each_alone(due)]
        step.row_gradients.append(
            _gradient_with_ids(values, lists, features, samples, owner, wire)
        )
        return [_at_owners(v.shape, marks.shard_spec(v)) for v in variables]

    internals.record_gradient(results, list(map(value_of, variables)), gradient)
    return results


def _has_copies(feature: Feature) -> bool:
    """Whether a rank keeps copies of its rows.

    Without unique rows, a sum of rows is sent for each sample.
    """
    return feature.unique and feature.keys is None


def _gradient_with_ids(
    upstream: Sequence[tf.Tensor],
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    samples: tf.Tensor,
    owner: OwnerRows,
    wire: Wire,
) -> RowGradient:
    """What is sent to the owners of rows.

    Args:
        upstream: per feature float32 `[b, dim]`, gradients of sums of rows.
        ids: see `look_up_at_owners`; so is `features`.
        features: features that were looked up.
        samples: float32 scalar, samples of this rank in the step.
        owner: what answers the lookup for this rank.
        wire: wire format of the gradients.
    """
    payload, splits, sample_ids, sample_splits = exchange.encode(
        ids, features, samples, False, owner.where
    )
    values = lookup_ops.parts_of_gradient(
        upstream,
        sample_ids,
        sample_splits,
        placements=owner.where["placements"],
        world_size=owner.where["world_size"],
    )
    _, seed = wire.seeds(owner.where["rank"])
    return RowGradient(
        owner.place.tag,
        id_ops.to_wire(
            values, owner.place.dtype, rounding=wire.rounding, seed=seed
        ),
        exchange.values_by_owner(sample_splits, features),
        (payload, splits),
    )


def _ask(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    collectives: Collectives,
    wire: Wire,
) -> tuple[tf.Tensor, Route, OwnerRows]:
    """Asks the owners of rows; see `look_up_at_owners` for the arguments.

    Returns:
        The replies of all owners, float32 `[v]`, how to join them, and what
        answers for this rank.
    """
    requests = collectives.requests
    step = collectives.step
    assert requests is not None and step is not None
    _check(features, wire, step.inner_graphs())
    dtype = tf.as_dtype(wire.dtype)
    used = exchange.used_tables(features)
    numbers = [requests.number_of(value_of(tables[i])) for i in used]
    kinds = [
        (f.name, f.table, f.combiner, f.out_of_range, f.unique)
        for f in features
    ]
    server = f"tables {numbers}, features {kinds}"
    place = collectives.place_of_request(
        f"{wire.label}/rows", dtype, server, bounded=True
    )
    owner = requests.owners.get(place.tag)
    if owner is None:
        owner = OwnerRows(place, features, tables, wire, collectives)
        requests.owners[place.tag] = owner
        requests.serve(place, owner.answer)
        requests.forget_with(owner, [place.tag])
    assert owner.serves(features, tables)
    requests.keep(owner)
    samples = collectives.samples()
    share = requests.share_of(samples) if step.weighted else tf.constant(1.0)
    payload, splits, sample_ids, sample_splits = exchange.encode(
        ids, features, samples, False, owner.where
    )
    variables = [lookup_ops.component(tables[index]) for index in used]
    for variable in variables:
        lookup_ops.watch(variable)
    values, _ = requests.request(
        place,
        payload,
        splits,
        requests.steps.read_value(),
        tables=variables,
        shards=[spec_to_json(marks.shard_spec(each)) for each in variables],
    )
    _, seed = wire.seeds(collectives.group.rank)
    parts = id_ops.from_wire(values, rounding=wire.rounding, seed=seed)
    count = tf.stack(
        [tf.size(lists[0].row_splits, tf.int64) - 1 for lists in ids]
    )
    return parts, Route(count, sample_ids, sample_splits, share), owner


def _check(
    features: Sequence[Feature], wire: Wire, inner: Sequence[tf.Graph]
) -> None:
    """Refuses what no owner can serve alone."""
    name = features[0].name
    problem = ""
    if wire.dtype == "int8" or wire.packed:
        problem = "wire_dtype='int8' and wire_packing are not served"
    elif any(feature.spec.storage != "host" for feature in features):
        problem = "tables in the memory of GPUs are not served"
    elif inner:
        problem = "it is called in a tf.function, a branch or a loop of a step"
    elif tf.executing_eagerly():
        problem = "the step runs eagerly (run_eagerly=True)"
    if problem:
        raise ValueError(
            f"Layer '{name}' with consistency.SSP or consistency.BAP: "
            f"{problem}. Change this, or use consistency.BSP()."
        )


@tf.RegisterGradient("Tfdist>Request")
def _request_gradient(
    op: tf.Operation, grad: tf.Tensor, _: tf.Tensor
) -> list[Gradient]:
    """Notes the gradient of replies; the owners compute that of the rows.

    The gradient of a table has no rows here. An optimizer that is given it
    sends the gradient of the replies to the owners.
    """
    collectives = collectives_lib.active()
    assert collectives is not None and collectives.step is not None
    collectives.step.row_gradients.append(
        RowGradient(op.get_attr("tag"), grad, op.outputs[1])
    )
    slices = [
        _at_owners(tf.TensorShape(shape), spec_from_json(shard))
        for shape, shard in zip(
            op.get_attr("table_shapes"), op.get_attr("shards"), strict=True
        )
    ]
    return [*slices, None, None, None]


def _at_owners(
    shape: tf.TensorShape, spec: ShardSpec | None
) -> tf.IndexedSlices:
    """The gradient of a shard, without rows: the owners compute them."""
    assert spec is not None
    values = tf.zeros([0, shape[1]])
    marks.set_at_owners(values)
    rows = tf.zeros([0], tf.int64)
    return lookup_ops.unique_slices(values, rows, shape.as_list(), spec)


def is_at_owners(values: tf.Tensor) -> bool:
    """Whether the values of a gradient are those that owners compute."""
    if marks.is_at_owners(values):
        return True
    # A layer that is called twice has the rows of both calls.
    if tf.is_symbolic_tensor(values) and values.op.type == "ConcatV2":
        return all(map(is_at_owners, list(values.op.inputs)[:-1]))
    return False
