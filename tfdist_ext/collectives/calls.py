# SPDX-License-Identifier: Apache-2.0
"""Calls that may overlap: told apart by their tags, or taking turns.

Exchanges of one tag meet in the order in which they arrive on each rank. That
is the order of the program inside of a step. It is not where tf.data maps a
layer over several elements at once, or ahead of the step that reads them, and
where threads of the user call it.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals

# Functions of datasets that have tags of their own at a time; a program may
# make any number of datasets, and every tag has buffers.
_DATASETS = 16
# How tf.data names the functions that it maps, filters or scans with. Those of
# `Dataset.reduce` run in their turn, like the ops around them.
_DATASET_FUNCTIONS = ("Dataset_", "tf_data_")

# Of what is staged for layers, which outlives a strategy in the process.
place_numbers = itertools.count()


def dataset_functions() -> list[tf.Graph]:
    """The functions of datasets that are being traced, innermost first."""
    found: list[tf.Graph] = []
    if tf.executing_eagerly():
        return found
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if str(getattr(graph, "name", "")).startswith(_DATASET_FUNCTIONS):
            found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


def role_of(fn: Callable[..., Any]) -> str:
    """What tells the steps of `fn` from those of other functions.

    A `predict` in one thread then never meets the `fit` of another.
    """
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


class Turns:
    """Lets the calls outside of steps run one after the other, by place.

    A call is several exchanges, of ids and of results. Where a rank answers
    one call before it starts the next, ranks may call for their elements in
    any order: every pair of exchanges belongs to one call of each rank, and
    each rank gets the rows it has asked for.
    """

    def __init__(self) -> None:
        self._locks: dict[str, tf.Tensor] = {}
        self._making = threading.Lock()
        self._numbers: weakref.WeakKeyDictionary[tf.Graph, int] = (
            weakref.WeakKeyDictionary()
        )
        self._next = itertools.count()
        self._places: weakref.WeakKeyDictionary[tf.Graph, str] = (
            weakref.WeakKeyDictionary()
        )

    def role(self) -> str:
        """The role of a call outside of a step: the function of a dataset.

        Functions get numbers as they are traced, in the order of the program.
        """
        graphs = dataset_functions()
        if not graphs:
            return ""
        graph = graphs[0]
        if graph not in self._numbers:
            self._numbers[graph] = next(self._next) % _DATASETS
        return f"dataset {self._numbers[graph]}"

    @contextlib.contextmanager
    def turn(self, place: str) -> Iterator[Callable[[Sequence[Any]], None]]:
        """Ops made inside run when no other call of the place is under way.

        Args:
            place: what has one set of tags.

        Yields:
            To be given the results: the next turn begins after them.
        """
        for graph in dataset_functions():
            self._places[graph] = place
        with tf.device("CPU:0"):
            # Held while this tensor lives: an error in a graph frees it too.
            lock = [tf.raw_ops.MutexLock(mutex=self._lock(place))]

        def end(results: Sequence[Any]) -> None:
            with tf.control_dependencies(list(results)), tf.device("CPU:0"):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock[0])

        try:
            with tf.control_dependencies(lock):
                yield end
        finally:
            lock.clear()  # an eager error's traceback would keep it

    def check_input(self, dataset: tf.data.Dataset) -> None:
        """Refuses what steps must not read: a dataset that calls a layer.

        Args:
            dataset: that is about to be distributed.

        Raises:
            ValueError: if a function of it looks up in partitioned tables.
        """
        for graph in internals.functions_of(dataset):
            if graph in self._places:
                raise ValueError(
                    f"The dataset looks up in partitioned tables "
                    f"({self._places[graph]}). tf.data runs ahead of the steps "
                    "and Keras opens some iterators only to close them, "
                    "differently on each rank, so ranks would wait for each "
                    "other for ever. Call the layer in the model, or look up "
                    "in `strategy.gather_table(layer)`."
                )

    def _lock(self, place: str) -> tf.Tensor:
        with self._making, tf.init_scope():
            if place not in self._locks:
                self._locks[place] = tf.raw_ops.MutexV2(
                    shared_name=f"tfdist_ext/{id(self)}/{place}"
                )
            return self._locks[place]


def brief(error: BaseException) -> str:
    """An error in a message to the other ranks, which has little room."""
    text = getattr(error, "message", None) or str(error)
    return f"{type(error).__name__}: {text.strip()[:700]}".rstrip(": ")
