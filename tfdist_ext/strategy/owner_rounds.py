# SPDX-License-Identifier: Apache-2.0
"""Rounds of `SSP` and `BAP`: owners apply the updates of all ranks.

Every dense variable has an owner, as every row of a table has. A step sends
its gradients to the owners. Each of them applies them at once, and replies
with the new values of its dense variables. A round ends where the ranks
synchronize.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.requests import Handler
from tfdist_ext.comm.requests import Place
from tfdist_ext.comm.requests import Requests
from tfdist_ext.comm.requests import Updates
from tfdist_ext.embedding.owner_rows import OwnerRows
from tfdist_ext.embedding.owner_rows import ids_and_values
from tfdist_ext.embedding.owner_rows import is_at_owners
from tfdist_ext.embedding.owner_rows import message_of
from tfdist_ext.embedding.row_copies import RowCopies
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.numbers.model_state import variables_of_optimizer
from tfdist_ext.strategy.local_rounds import component
from tfdist_ext.strategy.round_base import COUNT
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Round
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

_DENSE = "consistency/dense"
_STATE = "consistency/state"


class OwnerRound(Round):
    """The steps of one optimizer between two synchronizations.

    Args:
        steps: what the rounds of the strategy have in common.
        strategy: the strategy, to which no reference is kept.
        optimizer: the optimizer, to which no reference is kept.
    """

    asynchronous = True

    def __init__(
        self, steps: Steps, strategy: Strategy, optimizer: Optimizer
    ) -> None:
        super().__init__(steps)
        assert steps.collectives is not None
        assert steps.collectives.requests is not None
        self._requests: Requests = steps.collectives.requests
        self._copies: RowCopies | None = steps.collectives.row_copies
        self._strategy = weakref.ref(strategy)
        self._optimizer = weakref.ref(optimizer)
        self._owned: dict[int, tuple[Variable, int]] = {}
        self._bytes = [0] * steps.collectives.group.world_size
        self._served: set[int] = set()
        self._updates: list[Updates] = []
        self._lookups: dict[int, tuple[OwnerRows, Place]] = {}
        self._name = f"optimizer {self._requests.number_of(optimizer)}"
        self._requests.forget_with(optimizer, self._served)
        with tf.init_scope():
            # Owners set the optimizer's own counter to that of an update.
            iterations = component(optimizer.iterations)
            self._number = local_variable(iterations.read_value, "iterations")
            self._digests = _digests(_slots_of(optimizer))

    def step(self, optimizer: Optimizer, pairs: Pairs, apply: Apply) -> None:
        del optimizer, apply  # The owners call the optimizer.
        if tf.executing_eagerly():
            raise ValueError(
                "A step of consistency.SSP or consistency.BAP must be in a "
                "tf.function. Received: an eager step. Leave out "
                "run_eagerly=True, or use consistency.BSP()."
            )
        checks = self._begin_step()
        pairs = [(g, v) for g, v in pairs if g is not None]
        shards = [(g, v) for g, v in pairs if marks.gradient_spec(g)]
        dense = [(g, v) for g, v in pairs if not marks.gradient_spec(g)]
        for gradient, variable in shards:
            _check_unchanged(gradient, variable)
        with tf.control_dependencies(checks):
            number = self._number.read_value()
        sent = self._send_rows([v for _, v in shards], number)
        for dtype in sorted({value_of(v).dtype for _, v in dense}, key=str):
            chosen = [(g, v) for g, v in dense if value_of(v).dtype == dtype]
            sent += self._send_dense(chosen, dtype, number)
        with tf.control_dependencies(sent):
            self._number.assign_add(1)
            self._count.assign_add(1)
            if self._copies is not None:
                self._copies.open()
            self._requests.pushed.assign_add(1)

    def _send_rows(
        self, variables: Sequence[Variable], number: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sends the gradients of a step's lookups to the owners of rows."""
        collectives = self._steps.collectives
        assert collectives is not None and collectives.step is not None
        trained = {id(value_of(each)): each for each in variables}
        sent = []
        seen: set[int] = set()
        for gradient in collectives.step.row_gradients:
            rows: OwnerRows = self._requests.owners[gradient.tag]
            tables = [value_of(each) for each in rows.tables_of_gradients()]
            if not any(id(each) in trained for each in tables):
                continue
            _check_once(gradient.tag, seen, tables)
            label = rows.place.label.removesuffix("/rows")
            place = collectives.place_of_request(
                f"{label}/gradients",
                tf.uint8,
                f"{self._name}, {rows.place.tag}",
            )
            if place.tag not in self._served:
                self._served.add(place.tag)
                known = [trained.get(id(each)) for each in tables]
                make = functools.partial(
                    self._row_handler, rows, known, gradient.ids is not None
                )
                self._requests.serve_later(place, make)
            self._lookups[gradient.tag] = rows, place
            message = message_of(gradient)
            replies, _ = self._requests.request(place, *message, number)
            sent.append(replies)
        return sent

    def _row_handler(
        self,
        rows: OwnerRows,
        variables: Sequence[Variable | None],
        has_ids: bool,
    ) -> Handler:
        """Applies gradients of this rank's rows, when a rank sends them."""

        def handle(
            peer: tf.Tensor, message: tf.Tensor, number: tf.Tensor
        ) -> tf.Tensor:
            if has_ids:
                ids, gradients = ids_and_values(message)
            else:
                ids, gradients = rows.last_ids(peer), message
            scale = self._scale_of(rows.updates.unknown_to(peer))
            pairs = [
                (_scaled(gradient, scale), variable)
                for gradient, variable in zip(
                    rows.gradients(peer, ids, gradients), variables, strict=True
                )
                if variable is not None
            ]
            self._apply(pairs, number)
            rows.updates.add()
            return tf.zeros([0], tf.uint8)

        return self._in_replica_of_owner(handle)

    def _send_dense(
        self, pairs: Pairs, dtype: tf.DType, number: tf.Tensor
    ) -> list[tf.Tensor]:
        """Sends dense gradients to the owners, and takes their new values."""
        collectives = self._steps.collectives
        assert collectives is not None
        by_owner: list[list[Variable]] = [[] for _ in self._bytes]
        messages: list[list[tf.Tensor]] = [[] for _ in self._bytes]
        for gradient, variable in pairs:
            owner = self._owner_of(variable)
            by_owner[owner].append(variable)
            part = tf.cast(self._part(gradient), dtype)
            messages[owner].append(tf.reshape(part, [-1]))
        place = collectives.place_of_request(
            f"{_DENSE}/{dtype.name}", tf.uint8, self._name
        )
        rank = collectives.group.rank
        if place.tag not in self._served:
            self._served.add(place.tag)
            make = functools.partial(self._dense_handler, by_owner[rank], dtype)
            self._requests.serve_later(place, make)
        sizes = [sum(map(_size, variables)) for variables in by_owner]
        flat = tf.concat([each for parts in messages for each in parts], 0)
        values, _ = self._requests.request(
            place,
            tf.reshape(tf.bitcast(flat, tf.uint8), [-1]),
            tf.constant([size * dtype.size for size in sizes], tf.int64),
            number,
        )
        # This rank's own variables are up to date.
        others = [
            variable
            for owner, variables in enumerate(by_owner)
            for variable in variables
            if owner != rank
        ]
        assigned = [
            component(variable).assign(value)
            for variable, value in zip(
                others, _unpacked(values, others, dtype), strict=True
            )
        ]
        return [values, *map(tf.convert_to_tensor, assigned)]

    def _dense_handler(
        self, variables: Sequence[Variable], dtype: tf.DType
    ) -> Handler:
        """Applies gradients of this rank's variables; replies with them."""
        rank = self._requests.group.rank
        if not variables:
            return lambda peer, message, number: tf.zeros([0], tf.uint8)
        updates = Updates(len(self._bytes))
        self._updates.append(updates)

        def handle(
            peer: tf.Tensor, message: tf.Tensor, number: tf.Tensor
        ) -> tf.Tensor:
            scale = self._scale_of(updates.unknown_to(peer))
            gradients = _unpacked(message, variables, dtype)
            scaled = [_scaled(each, scale) for each in gradients]
            self._apply(list(zip(scaled, variables, strict=True)), number)
            updates.add()
            updates.set_known(peer)
            values = _packed([component(each) for each in variables])
            return values[: tf.where(peer == rank, 0, tf.size(values))]

        return self._in_replica_of_owner(handle)

    def _apply(self, pairs: Pairs, number: tf.Tensor) -> None:
        optimizer: Any = self._optimizer()
        iterations = component(optimizer.iterations)
        iterations.assign(tf.cast(number, iterations.dtype))
        with self._steps.passing(local=True):
            optimizer.apply_gradients(list(pairs))

    def _in_replica_of_owner(self, handler: Handler) -> Handler:
        """Runs a handler in a replica, outside of a step."""

        def run(*args: tf.Tensor) -> tf.Tensor:
            results = []
            strategy: Any = self._strategy()
            self._in_replica(strategy, lambda: results.append(handler(*args)))
            return results[0]

        return run

    def _scale_of(self, behind: tf.Tensor) -> tf.Tensor | None:
        """The factor of an update, by how old the values are that it is of.

        Args:
            behind: int64 scalar, updates of all ranks since these values were
                read.

        Returns:
            float32 scalar, or None if the factor is always 1.
        """
        steps = behind // len(self._bytes)
        self._requests.count_update(steps)
        if self._steps.mode.stale_scale != "inverse":
            return None
        return 1 / tf.cast(tf.maximum(steps, 1), tf.float32)

    def _part(self, gradient: Gradient) -> tf.Tensor:
        """This rank's part of a gradient of the global batch."""
        gradient = tf.convert_to_tensor(gradient)
        if not self._weighted:
            return gradient
        share = self._requests.share_of(self._steps.samples())
        # A rank without samples has a gradient of NaN.
        return tf.math.multiply_no_nan(gradient, tf.cast(share, gradient.dtype))

    def _owner_of(self, variable: Variable) -> int:
        """The rank that has the fewest bytes so far becomes the owner."""
        key = id(value_of(variable))
        if key not in self._owned:
            owner = int(np.argmin(self._bytes))
            self._bytes[owner] += _size(variable)
            self._owned[key] = variable, owner
        return self._owned[key][1]

    def clear(self) -> None:
        """Forgets copies of rows, and gradients that wait."""
        collectives = self._steps.collectives
        if self._copies is not None and collectives is not None:
            self._copies.clear()
            for rows, _ in self._lookups.values():
                rows.take_waiting(collectives)

    def is_complete(self) -> bool:
        """True: all ranks can synchronize after any step."""
        return True

    def variables(self) -> list[Variable]:
        return [variable for variable, _ in self._owned.values()]

    def end(self, strategy: Strategy, optimizer: Optimizer) -> None:
        """Gives all ranks the values of the owners."""
        collectives = self._steps.collectives
        assert collectives is not None
        mine = [
            int(self._count.numpy()),
            int(self._number.numpy()),
            self._requests.clock(),
        ]
        # No rank is in a step now, so nothing is on its way.
        found = collectives.all_gather(tf.constant([mine], tf.int64), COUNT)
        most = found.numpy().max(axis=0)
        iterations = component(optimizer.iterations)
        if most[0]:
            with collectives.joint_call("synchronize"):
                if self._copies is not None:
                    self._send_waiting(strategy, collectives)
                self._share(collectives, optimizer)
            iterations.assign(tf.cast(most[1], iterations.dtype))
        self._number.assign(tf.cast(iterations.read_value(), tf.int64))
        self._count.assign(0)
        if self._copies is not None:
            self._copies.clear()
        self._requests.reset(int(most[2]))

    def _send_waiting(
        self, strategy: Strategy, collectives: Collectives
    ) -> None:
        """Sends the gradients that wait, and awaits those of all ranks."""

        def send() -> None:
            for rows, place in self._lookups.values():
                message = message_of(rows.waiting_gradients(collectives))
                number = self._number.read_value()
                self._requests.request(place, *message, number)

        self._run_alone(strategy, len(self._lookups), send)
        collectives.barrier("consistency/sent")

    def _share(self, collectives: Collectives, optimizer: Optimizer) -> None:
        owned = [
            (component(variable), owner)
            for variable, owner in self._owned.values()
        ]
        slots = _slots_of(optimizer)
        digests = _digests(slots)
        pairs = zip(self._digests, digests, strict=True)
        changed = [int(old != new) for old, new in pairs]
        flags = collectives.all_gather(
            tf.constant([changed], tf.uint8), _STATE
        ).numpy()
        for i, slot in enumerate(slots):
            if flags[:, i].any():
                # The owner of a variable is the only one to change its slots.
                owned.append((slot, int(np.argmax(flags[:, i]))))
        _take_from_owners(collectives, owned)
        _average(collectives, list(self._requests.assigned.values()))
        self._digests = _digests(slots)


def _check_unchanged(gradient: tf.IndexedSlices, variable: Variable) -> None:
    if is_at_owners(gradient.values):
        return
    raise ValueError(
        f"The gradient of table '{variable.name}' was changed before the "
        "optimizer was given it (by clipping, scaling or a `train_step`). "
        "With consistency.SSP or consistency.BAP the owners of the rows "
        "compute it later. Change the loss, or use consistency.BSP()."
    )


def _check_once(tag: int, seen: set[int], tables: Sequence[Variable]) -> None:
    if tag not in seen:
        seen.add(tag)
        return
    raise ValueError(
        f"A step computes the gradient of table '{tables[0].name}' twice for "
        "one lookup. consistency.SSP and consistency.BAP send it once. Compute "
        "one gradient of the sum of the losses, or use consistency.BSP()."
    )


def _scaled(
    gradient: TensorOrSlices, scale: tf.Tensor | None
) -> TensorOrSlices:
    if scale is None:
        return gradient
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient * tf.cast(scale, gradient.dtype)
    values = gradient.values * tf.cast(scale, gradient.values.dtype)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def _size(variable: Variable) -> int:
    return int(value_of(variable).shape.num_elements())


def _packed(variables: Sequence[tf.Variable]) -> tf.Tensor:
    """Values of variables as uint8 `[bytes]`."""
    parts = [_as_bytes(each.read_value()) for each in variables]
    return tf.concat(parts, 0) if parts else tf.zeros([0], tf.uint8)


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    if value.dtype.size == 1:
        return tf.reshape(tf.cast(value, tf.uint8), [-1])
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _unpacked(
    message: tf.Tensor, variables: Sequence[Variable], dtype: tf.DType
) -> list[tf.Tensor]:
    """Values of variables of one dtype, from uint8 `[bytes]`."""
    if not variables:
        return []
    flat = tf.bitcast(tf.reshape(message, [-1, dtype.size]), dtype)
    parts = tf.split(flat, list(map(_size, variables)))
    return [
        tf.reshape(part, value_of(variable).shape)
        for part, variable in zip(parts, variables, strict=True)
    ]


def _slots_of(optimizer: Optimizer) -> list[tf.Variable]:
    """Variables of an optimizer that are equal on synchronized ranks."""
    variables = variables_of_optimizer(optimizer)
    for own in getattr(optimizer, "table_optimizers", ()):
        variables += variables_of_optimizer(own)
    counter = value_of(optimizer.iterations)
    return [
        component(each)
        for each in variables
        if internals.is_mirrored(value_of(each))
        and value_of(each) is not counter
    ]


def _digests(variables: Sequence[tf.Variable]) -> list[bytes]:
    return [
        hashlib.blake2b(each.numpy().tobytes(), digest_size=8).digest()
        for each in variables
    ]


def _take_from_owners(
    collectives: Collectives, owned: Sequence[tuple[tf.Variable, int]]
) -> None:
    """Gives variables on all ranks the values of their owners."""
    rank = collectives.group.rank
    mine = _packed([variable for variable, owner in owned if owner == rank])
    everything = collectives.all_gather(mine, _STATE)
    start = 0
    for owner in range(collectives.group.world_size):
        for variable in [each for each, by in owned if by == owner]:
            dtype = variable.dtype
            end = start + _size(variable) * dtype.size
            part, start = everything[start:end], end
            if owner == rank:
                continue
            if dtype.size == 1:
                value = tf.cast(part, dtype)
            else:
                value = tf.bitcast(tf.reshape(part, [-1, dtype.size]), dtype)
            variable.assign(tf.reshape(value, variable.shape))


def _average(
    collectives: Collectives, variables: Sequence[tf.Variable]
) -> None:
    """Gives variables that every rank has assigned their mean."""
    ranks = collectives.group.world_size
    parts = [
        each.read_value() / tf.cast(ranks, each.dtype) for each in variables
    ]
    sums = collectives.all_reduce(parts, _STATE)
    for variable, value in zip(variables, sums, strict=True):
        variable.assign(value)
