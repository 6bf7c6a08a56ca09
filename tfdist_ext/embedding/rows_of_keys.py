# SPDX-License-Identifier: Apache-2.0
"""The stage before a lookup: maps keys of dynamic vocabularies to rows."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding.capture import Lookup
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.prefetched_ids import Ahead
from tfdist_ext.embedding.prefetched_ids import store
from tfdist_ext.embedding.prefetched_ids import stored_or
from tfdist_ext.keras_internals import value_of
from tfdist_ext.ops import vocabulary_ops
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T

keras = tf.keras


class KeySteps:
    """The steps of one dynamic vocabulary on this rank."""

    def __init__(self) -> None:
        with tf.init_scope():
            # A variable of this rank only, on the host.
            self._pending = tf.Variable(
                False,
                trainable=False,
                synchronization=tf.VariableSynchronization.NONE,
                name="pending_keys",
            )
        self._traced: Any = None
        _alive.add(self)
        hold(Need.VOCABULARY, self)

    def may_begin(self) -> bool:
        """Whether a lookup being traced is the first of its graph."""
        graph = internals.current_graph()
        if graph is None:
            return True
        if self._traced is not None and self._traced() is graph:
            return False
        self._traced = weakref.ref(graph)
        return True

    def is_pending(self) -> tf.Tensor:
        """bool scalar: whether keys of the step wait for their gradients."""
        return tf.convert_to_tensor(self._pending)

    def set_pending(self, pending: bool | tf.Tensor) -> None:
        """Sets whether keys of the step wait for their gradients.

        Args:
            pending: bool scalar.
        """
        self._pending.assign(pending)


_alive: weakref.WeakSet[KeySteps] = weakref.WeakSet()


def end_steps(original: Original[T], *args: Any, **kwargs: Any) -> T:
    result = original(*args, **kwargs)
    for steps in list(_alive):
        steps.set_pending(False)
    return result


def in_step(
    vocabularies: list[KeySteps],
    learn: bool,
    look_up: Callable[[bool], T],
) -> T:
    """Looks up keys, and begins a step first if none has begun.

    Args:
        vocabularies: the steps of all dynamic vocabularies of the lookup.
        learn: whether the vocabularies learn from the lookup.
        look_up: looks up the keys. Its argument is whether a step begins, and
            it returns tensors.

    Returns:
        The result of `look_up`.
    """
    if not learn:
        return look_up(False)
    first = [each.may_begin() for each in vocabularies]  # calls all of them
    pending = [each.is_pending() for each in vocabularies]
    if not all(first):
        found = look_up(False)
    elif tf.executing_eagerly():
        found = look_up(not any(map(bool, pending)))
    else:
        found = tf.cond(
            tf.reduce_any(tf.stack(pending)),
            lambda: look_up(False),
            lambda: look_up(True),
        )
    if internals.is_recording():
        for each in vocabularies:
            each.set_pending(True)
    return found


# Stores what was sent of the next batch, after the results of this one.
Remember = Callable[[Sequence[tf.Tensor]], None]
# Rows for every list of keys; and, for every vocabulary, rows that lost a key.
_Rows = tuple[list[tf.Tensor], list[tf.Tensor]]


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The keys of a lookup, grouped by vocabulary.

    Attributes:
        keys: the `KeyShard` of every vocabulary.
        lists: lists of keys, each int64 `[n]` or `[n, 2]`.
        of_list: the index of every list's vocabulary, ascending.
        features: the indices of the features of the lists, in order.
    """

    keys: list[Any]
    lists: list[tf.Tensor]
    of_list: list[int]
    features: list[int]

    @property
    def handles(self) -> list[tf.Tensor]:
        return [each.handle for each in self.keys]

    @property
    def steps(self) -> list[KeySteps]:
        return [each.steps for each in self.keys]


@dataclasses.dataclass(frozen=True)
class _Questions:
    """Keys that the ranks have sent to each other.

    Attributes:
        payload: uint8 `[B]`, the keys that all ranks ask of this rank.
        splits: int64 `[world_size]`, the bytes of each rank.
        positions, places, asked: this rank's keys, see `ask_keys`.
    """

    payload: tf.Tensor
    splits: tf.Tensor
    positions: tf.Tensor
    places: tf.Tensor
    asked: tf.Tensor


_SPECS = _Questions(
    tf.TensorSpec([None], tf.uint8),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.int32),
    tf.TensorSpec([None], tf.int32),
    tf.TensorSpec([None, None], tf.int64),
)


def rows_of_keys(
    lookup: Lookup,
    collectives: Collectives | None,
    learn: bool,
    ahead: Ahead | None = None,
) -> tuple[list[Sequence[Ids]], Remember]:
    """Replaces keys of dynamic vocabularies by rows, or by -1 if there is none.

    Args:
        lookup: the lookup. Ids of other features are not changed. Rows of its
            tables that lose their keys are reset to initial values.
        collectives: the strategy's collectives; None in one process.
        learn: whether keys are counted and admitted. They are also counted
            and admitted whenever a gradient tape may record.
        ahead: the next batch, whose keys are sent to their owners. They find
            and count them in the step of that batch. None sends only this
            batch's keys.

    Returns:
        Per feature, the lists whose results are summed; and a function that
        stores what was sent of the next batch, to be called with the results
        of the lookup.

    Raises:
        tf.errors.FailedPreconditionError: on every rank, if a vocabulary is
            full.
    """
    ids = lookup.ids
    learn = learn or internals.is_recording()
    found = list(ids)
    remember: Remember = _nothing
    asked = _asked(ids, lookup.features)
    if not asked.features:
        return found, remember
    if collectives is None:
        rows, resets = _look_here(asked, learn)
    else:
        with collectives.one_call(f"{lookup.wire.label}/keys") as end:
            (rows, resets), remember = _ask_owners(
                asked, collectives, lookup.wire.label, learn, ahead
            )
            end(rows)
        if collectives.step is not None:
            collectives.step.checks.append(rows[0])
    if learn:
        _reset(resets, asked, lookup)
        _store_texts(rows, asked, [x for f in asked.features for x in ids[f]])
    parts = iter(rows)
    for f in asked.features:
        found[f] = [
            dataclasses.replace(part, values=next(parts)) for part in ids[f]
        ]
    return found, remember


def _asked(ids: Sequence[Sequence[Ids]], features: Sequence[Feature]) -> _Asked:
    """Returns the keys among the ids of a lookup."""
    places = _places(features)
    of_features = [features[f].keys for f in places]
    keys = list({id(each): each for each in of_features}.values())
    of_list = [
        keys.index(each)
        for f, each in zip(places, of_features, strict=True)
        for _ in ids[f]
    ]
    return _Asked(keys, _lists(ids, places), of_list, places)


def _places(features: Sequence[Feature]) -> list[int]:
    """Returns the features with keys, grouped by vocabulary."""
    order: dict[int, int] = {}
    for feature in features:
        order.setdefault(id(feature.keys), len(order))
    chosen = [f for f, each in enumerate(features) if each.keys is not None]
    return sorted(chosen, key=lambda f: order[id(features[f].keys)])


def _lists(
    ids: Sequence[Sequence[Ids]], places: Sequence[int]
) -> list[tf.Tensor]:
    """Returns the lists of keys of some features."""
    return [as_numbers(part.values) for f in places for part in ids[f]]


def as_numbers(values: tf.Tensor) -> tf.Tensor:
    """Returns keys as int64 `[n]`, or strings as fingerprints `[n, 2]`."""
    if values.dtype == tf.string:
        return vocabulary_ops.fingerprints(values)
    return tf.cast(values, tf.int64)


def _look_here(asked: _Asked, learn: bool) -> _Rows:
    def look_up(advance: bool) -> _Rows:
        return vocabulary_ops.local_rows(
            asked.handles,
            asked.lists,
            asked.of_list,
            learn=learn,
            advance=advance,
        )

    found: _Rows = in_step(asked.steps, learn, look_up)
    return found


def _ask_owners(
    asked: _Asked,
    collectives: Collectives,
    label: str,
    learn: bool,
    ahead: Ahead | None,
) -> tuple[_Rows, Remember]:
    def ask() -> _Questions:
        return _sent(asked, collectives, f"{label}/keys")

    if ahead is None:
        return _answered(asked, ask(), collectives, label, learn), _nothing
    position = _position(asked, ahead)
    questions = stored_or(ask, _SPECS, position, ahead.place)
    rows = _answered(asked, questions, collectives, label, learn)
    # The op that makes the next keys unique is created after the op that
    # answers this batch's, so TensorFlow runs it later.
    of_next = dataclasses.replace(
        asked, lists=_lists(ahead.ids, asked.features)
    )
    following = _sent(of_next, collectives, f"{label}/next/keys")

    def remember(results: Sequence[tf.Tensor]) -> None:
        store(following, results, position, ahead.place)

    return rows, remember


def _nothing(results: Sequence[tf.Tensor]) -> None:
    """Stores nothing, as there is no next batch."""


def _position(asked: _Asked, ahead: Ahead) -> tf.Tensor:
    """Returns the position of a batch, and which ranks own its keys.

    A checkpoint that is read between two steps may change the owners.

    Returns:
        int64 `[2 + 3 V]`: the position of the batch and, for each of V
        vocabularies, the number of its buckets and its hash key.
    """
    owners = [
        vocabulary_ops.vocabulary_counts(handle)[6:] for handle in asked.handles
    ]
    return tf.concat([ahead.position, *owners], 0)


def _sent(asked: _Asked, collectives: Collectives, label: str) -> _Questions:
    payload, splits, *places = vocabulary_ops.ask_keys(
        asked.handles, asked.lists, asked.of_list
    )
    payload, splits = collectives.all_to_all(payload, splits, label)
    return _Questions(payload, splits, *places)


def _answered(
    asked: _Asked,
    questions: _Questions,
    collectives: Collectives,
    label: str,
    learn: bool,
) -> _Rows:
    def answer(advance: bool) -> tuple[tf.Tensor, tf.Tensor]:
        return vocabulary_ops.answer_keys(
            asked.handles,
            questions.payload,
            questions.splits,
            learn=learn,
            advance=advance,
        )

    answers, answer_splits = in_step(asked.steps, learn, answer)
    answers, answer_splits = collectives.all_to_all(
        answers, answer_splits, f"{label}/rows"
    )
    return vocabulary_ops.read_rows(
        asked.handles,
        asked.lists,
        asked.of_list,
        answers,
        answer_splits,
        questions.positions,
        questions.places,
        questions.asked,
    )


def _reset(
    resets: Sequence[tf.Tensor],
    asked: _Asked,
    lookup: Lookup,
) -> None:
    """Resets rows that have lost their keys, before they are read."""
    for keys, rows in zip(asked.keys, resets, strict=True):
        if keys.config.reuses_rows:
            (table,) = {f.table for f in lookup.features if f.keys is keys}
            keys.reset(value_of(lookup.tables[table]), rows)


def _store_texts(
    rows: Sequence[tf.Tensor], asked: _Asked, lists: Sequence[Ids]
) -> None:
    """Stores texts of keys, for vocabularies with `keep_text`."""
    for found, which, part in zip(rows, asked.of_list, lists, strict=True):
        keys = asked.keys[which]
        if keys.config.keep_text:
            vocabulary_ops.store_texts(keys.handle, found, part.values)
