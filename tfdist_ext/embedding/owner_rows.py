# SPDX-License-Identifier: Apache-2.0
"""Lookups and updates of rows that their owners serve at any time.

With `consistency.SSP` and `BAP` a rank does not wait until all ranks look up.
It sends its ids to the owners of the rows, a thread of each owner replies with
sums of rows, and later applies the gradients of these sums.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.requests import Place
from tfdist_ext.comm.requests import Requests
from tfdist_ext.embedding import exchange
from tfdist_ext.embedding.exchange import OwnedIds
from tfdist_ext.embedding.exchange import Route
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import request_ops  # registers the op
from tfdist_ext.tables.placement import spec_from_json
from tfdist_ext.tables.placement import spec_to_json
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Variable

assert request_ops


@dataclasses.dataclass
class _Read:
    """The last lookup of a rank.

    Attributes:
        payload: ids in the form of a message of every rank.
        splits: bytes of these messages.
        version: number of updates that the rows have had.
    """

    payload: tf.Tensor
    splits: tf.Tensor
    version: int


class OwnerRows:
    """The rows of this rank that one lookup of a step asks for.

    Args:
        place: kind of the requests.
        features: features that are looked up.
        tables: variables, this rank's part of each table.
        wire: wire format of the replies.
        collectives: collectives of the strategy.
        requests: what the ranks serve to each other.
    """

    def __init__(
        self,
        place: Place,
        features: Sequence[Feature],
        tables: Sequence[Variable],
        wire: Wire,
        collectives: Collectives,
        requests: Requests,
    ) -> None:
        self.place = place
        self._tables = tables
        self._features = features
        self._wire = wire
        self._requests = requests
        group = collectives.group
        self._ranks = group.world_size
        self.where: Keywords = {
            "placements": [feature.placement for feature in features],
            "rank": group.rank,
            "world_size": group.world_size,
        }
        self._reads: dict[int, _Read] = {}
        self._version = 0
        with tf.init_scope():
            self._empty = self._empty_messages()
            answer = tf.function(self._answer, autograph=False)
            self._function = answer.get_concrete_function(
                tf.TensorSpec([None], tf.uint8),
                tf.TensorSpec([self._ranks], tf.int64),
                tf.TensorSpec([], tf.int64),
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

    def answer(self, peer: int, message: tf.Tensor, step: int) -> tf.Tensor:
        """Sums the rows that a rank asks for; a handler of `Requests`."""
        self._requests.await_step(step)
        messages = list(self._empty)
        messages[peer] = message
        payload = tf.concat(messages, 0)
        splits = tf.constant([int(each.shape[0]) for each in messages])
        splits = tf.cast(splits, tf.int64)
        with self._requests.updating:
            values: tf.Tensor = self._function(
                payload, splits, tf.constant(step, tf.int64)
            )
            self._reads[peer] = _Read(payload, splits, self._version)
        return values

    def _answer(
        self, payload: tf.Tensor, splits: tf.Tensor, seed: tf.Tensor
    ) -> tf.Tensor:
        values, _ = exchange.lookup(
            self._tables, self._features, self._owned(payload, splits)
        )
        return id_ops.to_wire(
            values,
            self.place.dtype,
            rounding=self._wire.rounding,
            seed=seed,
        )

    def _owned(self, payload: tf.Tensor, splits: tf.Tensor) -> OwnedIds:
        with tf.device("CPU:0"):
            row_splits, rows, weights, served, _ = id_ops.decode_ids(
                payload, splits, **self.where
            )
        return OwnedIds(row_splits, rows, weights, served)

    def gradients(
        self, payload: tf.Tensor, splits: tf.Tensor, replies: tf.Tensor
    ) -> list[tf.IndexedSlices]:
        """Gradients of this rank's tables from those of a rank's replies.

        Args:
            payload: ids of the lookup, see `last_read`.
            splits: bytes of their messages.
            replies: uint8 `[bytes]`, gradients of the replies.
        """
        owned = self._owned(payload, splits)
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

    def tables_of_gradients(self) -> list[Variable]:
        """The tables that `gradients` returns the gradients of, in order."""
        return [self._tables[i] for i in exchange.used_tables(self._features)]

    def last_read(self, peer: int) -> tuple[tf.Tensor, tf.Tensor, int]:
        """The last lookup of a rank, and how old the rows are now.

        Returns:
            The arguments of `gradients`, and the number of updates that the
            rows have had since.
        """
        read = self._reads[peer]
        return read.payload, read.splits, self._version - read.version

    def count_update(self) -> None:
        """Counts an update of the rows."""
        self._version += 1


def ask_owners(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Variable],
    collectives: Collectives,
    wire: Wire,
) -> tuple[tf.Tensor, Route]:
    """Sums of rows as their owners have them now.

    Args:
        ids: per feature, the lists whose results are summed.
        features: features that are looked up.
        tables: variables, this rank's part of each table.
        collectives: collectives of the strategy.
        wire: wire format of the replies.

    Returns:
        The replies of all owners, float32 `[v]`, and how to join them.

    Raises:
        ValueError: a feature or the wire format needs all ranks at once.
    """
    requests = collectives.requests
    step = collectives.step
    assert requests is not None and step is not None
    _check(features, wire, step.inner_graphs())
    dtype = tf.as_dtype(wire.dtype)
    place = collectives.place_of_request(f"{wire.label}/rows", dtype)
    used = exchange.used_tables(features)
    owner = requests.owners.get(place.tag)
    if owner is None or not owner.serves(features, tables):
        owner = OwnerRows(place, features, tables, wire, collectives, requests)
        requests.owners[place.tag] = owner
        requests.serve(place, owner.answer)
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
    parts = id_ops.from_wire(values, rounding=wire.rounding)
    count = tf.stack(
        [tf.size(lists[0].row_splits, tf.int64) - 1 for lists in ids]
    )
    return parts, Route(count, sample_ids, sample_splits, share)


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
        (op.get_attr("tag"), grad, op.outputs[1])
    )
    slices: list[Gradient] = []
    for shape, shard in zip(
        op.get_attr("table_shapes"), op.get_attr("shards"), strict=True
    ):
        sizes = tf.TensorShape(shape).as_list()
        values = tf.zeros([0, sizes[1]])
        marks.set_at_owners(values)
        rows = tf.zeros([0], tf.int64)
        spec = spec_from_json(shard)
        slices.append(lookup_ops.unique_slices(values, rows, sizes, spec))
    return [*slices, None, None, None]


def is_at_owners(values: tf.Tensor) -> bool:
    """Whether the values of a gradient are those that owners compute."""
    if marks.is_at_owners(values):
        return True
    # A layer that is called twice has the rows of both calls.
    if tf.is_symbolic_tensor(values) and values.op.type == "ConcatV2":
        return all(map(is_at_owners, list(values.op.inputs)[:-1]))
    return False
