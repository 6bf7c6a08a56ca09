# SPDX-License-Identifier: Apache-2.0
"""Order and tags of exchanges, the same on all ranks.

Exchanges of steps are distinguished by their tags, which all ranks compute
without communication. Calls outside of steps run one at a time.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

# Most dataset functions with tags of their own at a time. A program may create
# any number of datasets, and every tag has buffers.
_DATASETS = 16
# Prefixes of the names that tf.data gives to functions that it maps, filters or
# scans with. Functions of `Dataset.reduce` run in program order, like the ops
# around them.
_DATASET_FUNCTIONS = ("Dataset_", "tf_data_")

# Numbers for layers' staged state, which outlives a strategy.
place_numbers = itertools.count()


def dataset_functions() -> list[tf.Graph]:
    """Dataset functions that are being traced, innermost first."""
    found: list[tf.Graph] = []
    if tf.executing_eagerly():
        return found
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if str(getattr(graph, "name", "")).startswith(_DATASET_FUNCTIONS):
            found.append(graph)
        graph = getattr(graph, "outer_graph", None)
    return found


def role_of(fn: Callable[..., object]) -> str:
    """A name that distinguishes the steps of `fn` from other steps.

    With it, exchanges of a `predict` in one thread are not confused with
    exchanges of a `fit` in another thread.
    """
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


class CallLock:
    """The call lock: runs calls outside of steps one after another, by place.

    A call is several exchanges, of ids and of results. Each rank finishes one
    call before it starts the next. Ranks may therefore call in any order of
    their elements: every exchange belongs to one call of each rank, and each
    rank gets the rows that it asked for.
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
        """The role of a call outside of a step: its dataset function.

        Functions are numbered as they are traced, in program order.
        """
        graphs = dataset_functions()
        if not graphs:
            return ""
        graph = graphs[0]
        if graph not in self._numbers:
            self._numbers[graph] = next(self._next) % _DATASETS
        return f"dataset {self._numbers[graph]}"

    @contextlib.contextmanager
    def hold(self, place: str) -> Iterator[Callable[[Sequence[object]], None]]:
        """Makes the ops created in the context wait for calls of the place.

        Args:
            place: name of the call's set of tags.

        Yields:
            A function to be called with the results; the next call begins after
            them.
        """
        for graph in dataset_functions():
            self._places[graph] = place
        with tf.device("CPU:0"):
            # The lock is held as long as this tensor exists, so an error in a
            # graph frees it too.
            lock = [tf.raw_ops.MutexLock(mutex=self._lock(place))]

        def end(results: Sequence[object]) -> None:
            with tf.control_dependencies(list(results)), tf.device("CPU:0"):
                tf.raw_ops.ConsumeMutexLock(mutex_lock=lock[0])

        try:
            with tf.control_dependencies(lock):
                yield end
        finally:
            lock.clear()  # a traceback would keep it

    def check_input(self, dataset: tf.data.Dataset) -> None:
        """Rejects a dataset that calls a layer, which steps must not read.

        Args:
            dataset: dataset that is about to be distributed.

        Raises:
            ValueError: a function of the dataset looks up in partitioned
                tables.
        """
        for graph in internals.functions_of(dataset):
            if graph in self._places:
                raise ValueError(
                    "The dataset looks up in partitioned tables "
                    f"({self._places[graph]}). tf.data runs ahead of the "
                    "steps, and Keras opens and closes some iterators on some "
                    "of the ranks only, so ranks would wait for each other "
                    "forever. Call the layer in the model, or look up in "
                    "`strategy.gather_table(layer)`."
                )

    def _lock(self, place: str) -> tf.Tensor:
        with self._making, tf.init_scope():
            if place not in self._locks:
                self._locks[place] = tf.raw_ops.MutexV2(
                    shared_name=f"tfdist_ext/{id(self)}/{place}"
                )
            return self._locks[place]


def brief_error(error: BaseException) -> str:
    """A short form of an error, for messages to other ranks."""
    text = getattr(error, "message", None) or str(error)
    return f"{type(error).__name__}: {text.strip()[:700]}".rstrip(": ")


_KERAS_STEPS = ("train_step", "test_step", "predict_step")


class RowGradient(NamedTuple):
    """The gradient of a lookup, which the owners of the rows apply.

    Attributes:
        tag: tag of the requests for the rows.
        values: `[n]`, gradients of the owners' replies, in their dtype.
        splits: int64 `[world_size]`, the number of these values by owner.
        ids: messages with the ids of all rows and their bytes by owner, see
            `exchange.encode`; None if they are the ids that were asked for.
    """

    tag: int
    values: tf.Tensor
    splits: tf.Tensor
    ids: tuple[tf.Tensor, tf.Tensor] | None = None


@dataclasses.dataclass
class Step:
    """State of one `Strategy.run` call.

    Attributes:
        samples: float32 scalar, samples of this rank in the step.
        weighted: whether gradients are averaged over ranks, weighted by their
            samples. True in Keras's loops, where a loss is a mean over the
            batch; elsewhere gradients are summed.
        role: name of the function that is the step, see `calls.role_of`.
        graph: graph that the step runs in, None if it runs eagerly.
        is_function: whether the function that runs is a `tf.function`.
        labels: how often each label was used, for unique tags.
        exchanges: one line for each exchange, in program order.
        checks: tensors that exist once all ids of the step are validated.
        shares: shares of the batch on this rank, by the tensor's graph.
        dependence: `batches.dependence.BatchDependence` of the step's values.
        whole_values: `batches.whole_functions.WholeValues` of the step's
            values.
        backward: whether a tape computes gradients now. Exchanges are then the
            gradients of exchanges of the forward pass.
        forward: whether a sum over the ranks is requested that a tape records.
            The tape does not see its ops, as its gradient is custom.
        optimizes: whether an optimizer applies gradients now. Sums over the
            ranks that are requested meanwhile are those of gradients.
        merges_rows: whether gradients of equal rows are summed before anything
            else uses them.
        checking: whether every rank runs the step on the entire batch, to
            compute what one process computes. Means over the ranks are then
            means of equal values, and nothing is corrected for the ranks' parts
            of the batch.
        whole: whether the current computation is on the entire batch, on every
            rank: a loss or a metric that needs all samples.
        rows: rows of the entire batch, by the graph and the tensor of this
            rank's rows.
        assigned: mirrored variables without `aggregation` that the step has
            assigned, other than by an optimizer.
        later: components of variables whose values are made equal on all ranks
            at the end of the step.
        asynchronous: whether other ranks may be in other steps: the step has no
            collectives, and the owners of rows and variables answer requests.
        owners: what errors of compressed gradients are kept for: the optimizer
            that sums them, or the variables.
        row_gradients: gradients that are to be sent to the owners of rows.
        model: the model whose step it is, None if that is not known.
        metric_sums: sums of states of its metrics over the ranks, see
            `metric_sums`.
    """

    samples: tf.Tensor
    weighted: bool
    role: str = ""
    graph: tf.Graph | None = None
    is_function: bool = False
    labels: collections.Counter[str] = dataclasses.field(
        default_factory=collections.Counter
    )
    exchanges: list[str] = dataclasses.field(default_factory=list)
    checks: list[tf.Tensor] = dataclasses.field(default_factory=list)
    shares: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    dependence: Any = None
    whole_values: Any = None
    backward: bool = False
    forward: bool = False
    optimizes: bool = False
    merges_rows: bool = False
    checking: bool = False
    whole: bool = False
    rows: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    assigned: list[tf.Variable] = dataclasses.field(default_factory=list)
    later: list[tf.Variable] = dataclasses.field(default_factory=list)
    asynchronous: bool = False
    owners: Sequence[object] = ()
    row_gradients: list[RowGradient] = dataclasses.field(default_factory=list)
    model: Model | None = None
    metric_sums: dict[tuple[int, int], Any] = dataclasses.field(
        default_factory=dict
    )

    @contextlib.contextmanager
    def on_whole_batch(self) -> Iterator[None]:
        """Marks computations in the context as being on the entire batch."""
        outer, self.whole = self.whole, True
        try:
            yield
        finally:
            self.whole = outer

    @contextlib.contextmanager
    def optimizing(
        self, optimizer: Optimizer, merges_rows: bool
    ) -> Iterator[None]:
        """Marks the context as that of an optimizer that applies gradients.

        Args:
            optimizer: the optimizer.
            merges_rows: whether it sums the gradients of equal rows first.
        """
        outer = self.optimizes, self.merges_rows
        self.optimizes, self.merges_rows = True, merges_rows
        try:
            with self.summing([optimizer]):
                yield
        finally:
            self.optimizes, self.merges_rows = outer

    @contextlib.contextmanager
    def summing(self, owners: Sequence[object]) -> Iterator[None]:
        """Sets `owners` for sums of gradients in the context."""
        outer, self.owners = self.owners, owners
        try:
            yield
        finally:
            self.owners = outer

    def inner_graphs(self) -> list[tf.Graph]:
        """Graphs within the step's that are being traced, outermost first.

        They are graphs of user functions, which are cached and may be called
        again in this step and in others, and graphs of branches and loops.
        """
        graphs = internals.graphs_within(self.graph)
        return graphs[1:] if self.is_function else graphs

    def inner_function(self) -> tf.Graph | None:
        """The innermost `tf.function` being traced within the step."""
        functions = filter(internals.is_function, self.inner_graphs())
        return next(reversed(list(functions)), None)

    def checks_here(self) -> list[tf.Tensor]:
        """Those of `checks` that must come before a variable is written.

        Checks of an inner function or branch are not accessible outside of it.
        If one fails, the function or branch fails.
        """
        if tf.executing_eagerly():
            return []
        graphs = [self.graph, *internals.graphs_within(self.graph)]
        return [check for check in self.checks if check.graph in graphs]

    def copied(self, graph: tf.Graph) -> Step:
        """A copy of the step, for a trace that must not change it.

        Args:
            graph: graph of that trace.
        """
        return dataclasses.replace(
            self,
            graph=graph,
            is_function=False,
            labels=self.labels.copy(),
            exchanges=[],
            checks=[],
            shares={},
            dependence=None,
            whole_values=None,
            rows={},
            assigned=[],
            later=[],
            row_gradients=[],
            metric_sums={},
        )


def count_samples(values: Nest) -> tf.Tensor:
    """Leading dimension of the first batched tensor in a nest.

    Args:
        values: nest of tensors, SparseTensors and RaggedTensors.

    Returns:
        float32 scalar; 1 if there is no batched tensor.
    """
    for value in tf.nest.flatten(values):
        if isinstance(value, tf.SparseTensor):
            return tf.cast(value.dense_shape[0], tf.float32)
        if hasattr(value, "nrows"):  # RaggedTensor and PrefetchedIds
            return tf.cast(value.nrows(), tf.float32)
        if tf.is_tensor(value) and value.shape.rank != 0:
            if value.shape.rank and value.shape[0] is not None:
                return tf.constant(float(value.shape[0]))
            return tf.cast(tf.shape(value)[0], tf.float32)
    return tf.constant(1.0)


def is_keras_loop(fn: Callable[..., object]) -> bool:
    """Whether `fn`, passed to `Strategy.run`, is a step of Keras's loops.

    Other methods of a model are steps of the user's own loops.
    """
    fn = getattr(fn, "python_function", fn)
    method = inspect.unwrap(fn)
    owner = getattr(method, "__self__", None)
    # For a method that is a tf.function, the owner is a wrapper.
    owner = getattr(owner, "target", owner)
    if isinstance(owner, tf.keras.Model):
        return getattr(method, "__name__", None) in _KERAS_STEPS
    module = getattr(fn, "__module__", None) or ""
    return module.split(".")[0] in ("keras", "tf_keras")


def model_of(fn: Callable[..., object]) -> Model | None:
    """The model whose step a function is; None if it does not tell.

    Steps of Keras 3 are methods of the model. Those of tf_keras are functions
    that use a variable `model` of the function around them.
    """
    fn = inspect.unwrap(getattr(fn, "python_function", fn))
    model = getattr(fn, "__self__", None)
    if model is None and inspect.isfunction(fn) and is_keras_loop(fn):
        model = inspect.getclosurevars(fn).nonlocals.get("model")
    return model if isinstance(model, tf.keras.Model) else None


def is_evaluation(fn: Callable[..., object]) -> bool:
    """Whether `fn` is a step of Keras's `evaluate` or `predict`."""
    role = role_of(fn)
    return is_keras_loop(fn) and any(
        name in role
        for name in ("test_step", "predict_step", "test_func", "predict_func")
    )


def is_gradient_reduction(step: Step | None) -> bool:
    """Whether an all-reduce requested now is one of gradients.

    Sums requested while a tape records belong to the forward pass (a
    synchronized batch normalization, for example).

    Args:
        step: current step, None without one.
    """
    forward = step is not None and step.forward
    return not (forward or internals.is_recording())


# Most functions within steps with tags of their own at a time, as every tag has
# buffers. Functions that share tags run one at a time.
_FUNCTIONS = 64


class Tags:
    """Assigns tags to exchanges: by origin, label and occurrence.

    The origin is the function that is the step, a `tf.function` within it, or a
    dataset function. The latter two are numbered as they are traced, in program
    order.

    Args:
        call_lock: call lock for the calls outside of steps.
    """

    def __init__(self, call_lock: CallLock) -> None:
        self._call_lock = call_lock
        self._labels: weakref.WeakKeyDictionary[
            tf.Graph, collections.Counter[str]
        ] = weakref.WeakKeyDictionary()
        self._functions: weakref.WeakKeyDictionary[tf.Graph, int] = (
            weakref.WeakKeyDictionary()
        )
        self._next = itertools.count()

    def place(self, step: Step | None, label: str) -> str:
        """A name that distinguishes the next exchange of a label from others.

        Args:
            step: current step, None outside of steps.
            label: label of the exchange.
        """
        return f"{self._role(step)}/{label}#{self.occurrence(step, label)}"

    def occurrence(self, step: Step | None, label: str) -> int:
        """Number of exchanges with the label so far.

        Args:
            step: see `place`.
            label: label of the exchanges.
        """
        return self._counter(step)[label]

    def take(
        self, step: Step | None, label: str, kind: str, dtype: tf.DType
    ) -> int:
        """Takes an even number for an exchange, and records it in the step.

        Args:
            step: see `place`.
            label: label of the exchange.
            kind: kind of the exchange.
            dtype: dtype of the values that are exchanged.
        """
        place = self.place(step, label)
        if step is not None:
            own = step.inner_function() is None
            line = f"{label}#{self.occurrence(step, label)}" if own else place
            step.exchanges += [f"{line} {kind} {dtype.name}"]
        self._counter(step)[label] += 1
        # There are 2^61 tags: among a million places, two have the same tag
        # with a probability of 2e-7.
        digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 3) << 1

    def _role(self, step: Step | None) -> str:
        if step is None:
            return self._call_lock.role()
        function = step.inner_function()
        if function is None:
            return step.role
        if function not in self._functions:
            self._functions[function] = next(self._next) % _FUNCTIONS
        return f"function {self._functions[function]}"

    def _counter(self, step: Step | None) -> collections.Counter[str]:
        function = step.inner_function() if step else internals.current_graph()
        if function is not None:
            return self._labels.setdefault(function, collections.Counter())
        return step.labels if step else collections.Counter()


@dataclasses.dataclass(eq=False)
class Trial:
    """Records made while a step is traced or run for a comparison.

    Attributes:
        whole: whether every rank has the entire batch, so that each computes
            what one process computes. Nothing is then reduced over the ranks;
            lookups still ask the ranks that own the rows.
        updates: trainable variables, each with its update: the gradient as the
            optimizer applies it.
        marker: device function that is unique to this run. `tf.function` traces
            anew under each device function, so a trace made for a comparison is
            never used in training.
    """

    whole: bool
    updates: list[tuple[Variable, TensorOrSlices]] = dataclasses.field(
        default_factory=list
    )

    def marker(self, op: tf.Operation) -> str:
        """Returns the device of an op unchanged."""
        return str(op.device)

    def marking(self) -> contextlib.AbstractContextManager[object]:
        """A context in which functions are traced for this run only."""
        if tf.executing_eagerly():
            return contextlib.nullcontext()
        marking: contextlib.AbstractContextManager[object]
        marking = tf.compat.v1.device(self.marker)
        return marking

    def marked(self, function: Callable[..., T]) -> Callable[..., T]:
        """Wraps a replica's function to run under the marker in its thread.

        Args:
            function: function passed to `Strategy.run`.
        """
        if tf.executing_eagerly():
            return function
        converted = function
        if not hasattr(function, "python_function"):
            autograph = tf.__internal__.autograph
            converted = autograph.tf_convert(
                *(function, autograph.control_status_ctx()),
                convert_by_default=False,
            )

        def run(*args: Any, **kwargs: Any) -> T:
            with self.marking():
                return converted(*args, **kwargs)

        run.autograph_info__ = {}  # type: ignore[attr-defined]
        return run

    def note(self, variable: Variable, arguments: Sequence[object]) -> None:
        """Records an update of a variable.

        Args:
            variable: TensorFlow variable.
            arguments: arguments of the update; the gradient is the first.
        """
        value = arguments[0] if arguments else None
        if not variable.trainable or not (
            isinstance(value, tf.IndexedSlices) or tf.is_tensor(value)
        ):
            return
        self.updates.append((variable, value))
