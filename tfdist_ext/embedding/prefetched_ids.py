# SPDX-License-Identifier: Apache-2.0
"""Ids that the input pipeline makes, with the ids of the next batch.

A step exchanges the ids of the next batch while it computes the current batch,
as TorchRec's `TrainPipelineSparseDist` does. Of dynamic vocabularies it sends
the keys of the next batch to their owners, who look them up in their own step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import typing
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike


@dataclasses.dataclass(frozen=True)
class IdLists:
    """The ids of a batch.

    Attributes:
        lists: the lists of all features.
        samples: int64 scalar, the size of the batch.
    """

    lists: tuple[Ids, ...]
    samples: tf.Tensor


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a `PrefetchedIds`; see its properties of these names."""

    now: IdLists
    position: tf.Tensor
    layouts: tuple[Layout, ...]
    ahead: tuple[IdLists, ...]

    def tensors(self) -> list[tf.Tensor]:
        """Returns all tensors, in the order in which `_parts_of` reads them."""
        return [
            *_tensors_of(self.now),
            self.position,
            *(
                tensor
                for each in self.layouts
                for tensor in (each.count, each.inner, *each.splits)
            ),
            *(tensor for each in self.ahead for tensor in _tensors_of(each)),
        ]

    def form(self) -> str:
        """Returns what `_parts_of` needs to find the parts in the tensors."""
        layouts = [(o.sizes, len(o.splits), o.pad) for o in self.layouts]
        return json.dumps([len(self.now.lists), layouts, len(self.ahead)])


def _parts_of(ids: Any) -> _Parts:
    """Returns the parts of a `PrefetchedIds`, or of a spec their specs."""
    rest = iter(ids.tensors)
    count, layouts, ahead = json.loads(ids.form)
    return _Parts(
        _lists_of(rest, count),
        next(rest),
        tuple(
            Layout(
                next(rest),
                next(rest),
                tuple(sizes),
                tuple(itertools.islice(rest, splits)),
                tuple(pad),
            )
            for sizes, splits, pad in layouts
        ),
        tuple(_lists_of(rest, count) for _ in range(ahead)),
    )


def _tensors_of(ids: IdLists) -> list[tf.Tensor]:
    lists = [(x.values, x.row_splits, x.weights) for x in ids.lists]
    return [*itertools.chain(*lists), ids.samples]


def _lists_of(tensors: Iterator[tf.Tensor], count: int) -> IdLists:
    lists = tuple(
        Ids(next(tensors), next(tensors), next(tensors)) for _ in range(count)
    )
    return IdLists(lists, next(tensors))


class PrefetchedIds(
    tf.experimental.BatchableExtensionType, internals.NativeObject
):
    """Ids of all features of a layer, made by its `preprocess`.

    Keras passes it to the layer like a tensor, and slices it by samples like a
    RaggedTensor. All tensors are in one tuple, because TensorFlow takes
    milliseconds to create nested extension types in eager code.

    Attributes:
        tensors: the tensors of all parts, see `_Parts`.
        form: the static part of the parts.
        counts: the number of lists of each feature.
        which: its index among the `PrefetchedIds` of a dataset element.
    """

    class Spec:
        """The spec of `PrefetchedIds` as elements of a dataset."""

        dtype = tf.int64

        @property
        def shape(self: Any) -> tf.TensorShape:
            """The shape that Keras reads, see `PrefetchedIds.shape`."""
            return _shape_for_keras(_parts_of(self).layouts)

        def empty(self: Any) -> PrefetchedIds:
            """Returns an empty batch."""
            parts = _parts_of(self)
            lists = [
                Ids(
                    tf.zeros([0], each.values.dtype),
                    tf.zeros([1], each.row_splits.dtype),
                    tf.zeros([0], each.weights.dtype),
                )
                for each in parts.now.lists
            ]
            return _made(
                IdLists(tuple(lists), tf.zeros([], tf.int64)),
                tf.zeros([2], tf.int64),
                self.counts,
                [id_layout.empty(each) for each in parts.layouts],
            )

    tensors: typing.Tuple[tf.Tensor, ...]  # noqa: UP006 (ExtensionType)
    form: str
    counts: typing.Tuple[int, ...]  # noqa: UP006
    which: int = 0

    @property
    def now(self) -> IdLists:
        """The ids of this batch."""
        return _parts_of(self).now

    @property
    def ahead(self) -> tuple[IdLists, ...]:
        """The ids of the next batch of the iterator; empty without it."""
        return _parts_of(self).ahead

    @property
    def position(self) -> tf.Tensor:
        """int64 `[2]`, the number of the iterator and of its batch."""
        return _parts_of(self).position

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of the results of each feature."""
        return _parts_of(self).layouts

    @property
    def shape(self) -> tf.TensorShape:
        """The shape that Keras reads: a batch of lists of any length."""
        return _shape_for_keras(self.layouts)

    @property
    def dtype(self) -> tf.DType:
        """The dtype that Keras reads: an integer dtype, so it does not cast."""
        return tf.int64

    def nrows(self) -> tf.Tensor:
        """Returns the number of samples, an int64 scalar."""
        return self.now.samples

    def __getitem__(self, samples: slice) -> PrefetchedIds:
        """Returns consecutive samples, without ids of the next batch."""
        start, stop = samples.start, samples.stop
        parts = _parts_of(self)
        lists = [
            _cut(
                each,
                id_layout.lists_before(layout, start),
                id_layout.lists_before(layout, stop),
            )
            for of_feature, layout in zip(
                of_features(parts.now, self.counts), parts.layouts, strict=True
            )
            for each in of_feature
        ]
        return _made(
            IdLists(tuple(lists), tf.cast(stop - start, tf.int64)),
            parts.position,
            self.counts,
            [id_layout.cut(o, start, stop) for o in parts.layouts],
        )


def _made(
    now: IdLists,
    position: tf.Tensor,
    counts: Sequence[int],
    layouts: Sequence[Layout],
    ahead: tuple[IdLists, ...] = (),
    which: int = 0,
) -> PrefetchedIds:
    parts = _Parts(now, position, tuple(layouts), ahead)
    return PrefetchedIds(
        tuple(parts.tensors()), parts.form(), tuple(counts), which
    )


def _shape_for_keras(layouts: Sequence[Layout]) -> tf.TensorShape:
    return tf.TensorShape([*id_layout.static_shape(layouts[0]), None])


@tf.experimental.dispatch_for_api(tf.shape, {"input": PrefetchedIds})
def _shape(
    input: PrefetchedIds,
    out_type: tf.DType = tf.int32,
    name: str | None = None,
) -> tf.Tensor:
    # Keras 3 reads the batch size from the shape of its first input.
    return tf.cast(input.nrows(), out_type or tf.int32, name)[tf.newaxis]


def bundle(
    ids: Sequence[Sequence[Ids]], layouts: Sequence[Layout]
) -> PrefetchedIds:
    """Returns the result of a layer's `preprocess`.

    Args:
        ids: per feature, the lists whose results are summed.
        layouts: the layout of the results of each feature.
    """
    first = layouts[0]
    samples = first.count
    if first.splits:
        samples = tf.size(first.splits[0], tf.int64) - 1
    return _made(
        IdLists(tuple(itertools.chain(*ids)), samples),
        tf.zeros([2], tf.int64),
        tuple(map(len, ids)),
        layouts,
    )


def of_features(ids: IdLists, counts: Sequence[int]) -> list[list[Ids]]:
    """Returns for every feature the lists whose results are summed."""
    lists = iter(ids.lists)
    return [list(itertools.islice(lists, count)) for count in counts]


def _cut(ids: Ids, start: tf.Tensor, stop: tf.Tensor) -> Ids:
    row_splits = batches.copied(ids.row_splits[start : stop + 1])
    values, weights = (
        batches.rows(part, row_splits[0], row_splits[-1])
        for part in (ids.values, ids.weights)  # empty if all weights are 1
    )
    return Ids(values, row_splits - row_splits[0], weights)


def with_next(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Adds the next batch's ids to every `PrefetchedIds` of a dataset.

    Args:
        dataset: one rank's dataset; other elements are not changed.

    Returns:
        A dataset of the same length, whose iterators read one batch ahead.
    """
    spec = dataset.element_spec
    if not any(map(is_prefetched, tf.nest.flatten(spec))):
        return dataset
    end = batches.empty_like(dataset).take(1)
    nothing = _components(next(iter(end)))
    # Synchronous, so that no more than one batch is read ahead.
    return (
        dataset.concatenate(end)
        .map(_components, synchronous=True)
        .scan((tf.constant([0, -2], tf.int64), *nothing), _delay)
        .skip(1)
        .map(functools.partial(_pair, spec), synchronous=True)
    )


def _components(*batch: Nest) -> tuple[tf.Tensor, ...]:
    # `Dataset.scan` takes tensors only.
    return tuple(tf.nest.flatten(batch, expand_composites=True))


def _delay(
    state: tuple[tf.Tensor, ...], batch: tuple[tf.Tensor, ...]
) -> tuple[tuple[tf.Tensor, ...], tuple[tf.Tensor, ...]]:
    """Returns the previous batch with the current one, as `scan` requires."""
    position, *last = state
    # The time serves as a number that no other iterator has.
    now = tf.bitcast(tf.timestamp(), tf.int64)
    number = tf.where(position[0] == 0, now, position[0])
    position = tf.stack([number, position[1] + 1])
    return (position, *batch), (position, *last, *batch)


def _pair(spec: Nest, *tensors: tf.Tensor) -> Nest:
    """Makes a batch whose `PrefetchedIds` contain those of the next batch."""
    position, *rest = tensors
    half = len(rest) // 2
    components = tf.nest.flatten(spec, expand_composites=True)
    for tensor, component in zip(rest, components, strict=False):
        tensor.set_shape(component.shape)  # `scan` does not preserve it
    last, following = (
        tf.nest.pack_sequence_as(spec, part, expand_composites=True)
        for part in (rest[:half], rest[half:])
    )

    number = itertools.count()

    def unite(last: TensorLike, following: TensorLike) -> TensorLike:
        if not isinstance(last, PrefetchedIds):
            return last
        return _made(
            last.now,
            position,
            last.counts,
            last.layouts,
            (following.now,),
            next(number),
        )

    return tf.nest.map_structure(unite, last, following)


@dataclasses.dataclass(frozen=True)
class Ahead:
    """The next batch, whose ids or keys are sent in the current step.

    Attributes:
        ids: per feature, the lists of the next batch.
        samples: sizes of the current and of the next batch, int64 scalars.
        position: int64 `[2]`, see `exchange_ahead`.
        place: the name of the storage, see `exchange_ahead`.
    """

    ids: Sequence[Sequence[Ids]]
    samples: tuple[tf.Tensor, tf.Tensor]
    position: tf.Tensor
    place: str

    def of(self, features: Sequence[int], mark: str) -> Ahead:
        """Returns the part that belongs to some features.

        Args:
            features: indices of the features.
            mark: a suffix that distinguishes their storage from others'.
        """
        return dataclasses.replace(
            self,
            ids=[self.ids[feature] for feature in features],
            place=self.place + mark,
        )


def for_call(
    inputs: PrefetchedIds | TensorLike, place: Callable[[], str] | None
) -> tuple[list[list[Ids]], Ahead | None] | None:
    """Returns ids from the input pipeline, and the next batch if it is known.

    Args:
        inputs: the input of a layer.
        place: returns the name of the layer's storage for ids that are
            exchanged ahead; None in one process.

    Returns:
        None if `preprocess` did not make the input. Otherwise the ids of every
        feature, and the next batch or None.
    """
    if not is_prefetched(inputs):
        return None
    ahead, parts = None, _parts_of(inputs)
    if parts.ahead and place is not None:
        (following,) = parts.ahead
        ahead = Ahead(
            of_features(following, inputs.counts),
            (parts.now.samples, following.samples),
            parts.position,
            f"{place()}/{inputs.which}",
        )
    return of_features(parts.now, inputs.counts), ahead


def is_prefetched(value: object) -> bool:
    """Whether a value is a `PrefetchedIds` or its spec."""
    return isinstance(value, PrefetchedIds | PrefetchedIds.Spec)


def exchange_ahead(
    ask_now: Callable[[], T],
    ask_next: Callable[[], T],
    position: tf.Tensor,
    place: str,
) -> tuple[T, T]:
    """Returns the ids that the last step exchanged; exchanges the next ones.

    Stored ids carry the position of their batch, so a batch never receives the
    ids of another one, even if a program interleaves iterators. All ranks run
    the same steps, so all ranks find the ids or none does.

    Args:
        ask_now: exchanges this batch's ids. It is called if they are not
            stored: for an iterator's first batch, or after another iterator.
        ask_next: exchanges the next batch's ids. Both functions return
            dataclasses of tensors.
        position: int64 `[2]`, the number of the iterator and of its batch.
        place: the name of the storage, different for each layer, and for each
            of several inputs of one batch.

    Returns:
        The results for this batch, and those for the next batch.
    """
    following = ask_next()
    current = stored_or(ask_now, following, position, place)
    # Both exchanges succeed on all ranks or on none.
    store(following, _tensors(current), position, place)
    return current, following


def stored_or(
    ask_now: Callable[[], T], like: Any, position: tf.Tensor, place: str
) -> T:
    """Returns what `store` stored for a batch, or asks for it.

    Args:
        ask_now: returns a dataclass of tensors. It is called if nothing is
            stored, or if it was stored for another position.
        like: the same dataclass with tensors, or their specs, of the same
            dtypes and ranks.
        position: int64 `[p]`, the position of the batch.
        place: the name of the storage.
    """
    specs = _tensors(like)
    storage: Keywords = {
        "dtypes": [tf.int64, *(spec.dtype for spec in specs)],
        "shared_name": place,
    }

    def take() -> list[tf.Tensor]:
        return list(tf.raw_ops.Unstage(**storage))

    def nothing() -> list[tf.Tensor]:
        return [position - 1] + [
            tf.zeros([0] * (spec.shape.rank or 0), spec.dtype) for spec in specs
        ]

    found, *taken = tf.cond(tf.raw_ops.StageSize(**storage) > 0, take, nothing)
    current = tf.cond(
        tf.reduce_all(found == position),
        lambda: taken,
        lambda: _tensors(ask_now()),
    )
    for tensor, spec in zip(current, specs, strict=True):
        tensor.set_shape(tensor.shape.merge_with([None] * spec.shape.rank))
    result: T = _rebuilt(like, iter(current))
    return result


def store(
    following: object,
    results: Sequence[tf.Tensor],
    position: tf.Tensor,
    place: str,
) -> None:
    """Stores tensors of the next batch for its step.

    Args:
        following: a dataclass of tensors.
        results: tensors of the current batch, which all ranks have or none,
            so that after an error all ranks have stored the tensors or none.
        position: int64 `[p]`, the position of the current batch. Its second
            number is that of the batch.
        place: the name of the storage.
    """
    with tf.control_dependencies(results):
        of_next = position + tf.one_hot(1, tf.size(position), dtype=tf.int64)
        # This op is stateful, so it runs although its result is not used.
        tf.raw_ops.Stage(
            values=[of_next, *_tensors(following)], shared_name=place
        )


def _tensors(value: object) -> list[Any]:
    """Returns the tensors of nested dataclasses and lists, in order."""
    if tf.is_tensor(value) or isinstance(value, tf.TensorSpec):
        return [value]
    parts = value if isinstance(value, list) else _fields(value)
    return [tensor for part in parts for tensor in _tensors(part)]


def _rebuilt(like: Any, tensors: Iterator[tf.Tensor]) -> Any:
    if tf.is_tensor(like) or isinstance(like, tf.TensorSpec):
        return next(tensors)
    if isinstance(like, list):
        return [_rebuilt(part, tensors) for part in like]
    return type(like)(*[_rebuilt(part, tensors) for part in _fields(like)])


def _fields(value: Any) -> list[object]:
    return [getattr(value, f.name) for f in dataclasses.fields(value)]
