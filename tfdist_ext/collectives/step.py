# SPDX-License-Identifier: Apache-2.0
"""What is known while one step is traced or run under `Strategy.run`."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals

Nest = Any
_KERAS_STEPS = ("train_step", "test_step", "predict_step")


@dataclasses.dataclass
class Step:
    """State of one `Strategy.run` call.

    Attributes:
        samples: float32 scalar, samples of this rank in the step.
        weighted: whether ranks are averaged, weighed by their samples.
            True in Keras's loops, where a loss is a mean over the batch;
            elsewhere gradients are summed.
        role: of the function that is the step, see `calls.role_of`.
        graph: in which the step is run, None if eagerly.
        is_function: whether what is run is a `tf.function` itself.
        labels: how often each label was used, for unique tags.
        exchanges: one line for each of the step, in program order.
        checks: tensors that exist once all ids of the step are validated.
        shares: of the batch that this rank has, by the graph of the tensor.
        dependence: `batches.dependence.BatchDependence` of the step's values.
        whole_values: `batches.whole_functions.WholeValues` of them.
        backward: whether a tape computes gradients now. Exchanges are then
            those that belong to exchanges of the forward pass.
        forward: whether a sum over the ranks is asked for that a tape
            records. Its own gradient, which is given, hides it from the tape.
        merges_rows: whether the optimizer sums the gradients of equal rows
            before it uses them.
        checking: whether every rank runs the step on the whole batch, to
            compute what one process computes. Means over the ranks are then
            means of equal values, and nothing is corrected for the ranks'
            parts of the batch.
        whole: whether what is computed now is computed on the whole batch,
            on every rank: a loss or a metric that sees all samples.
        rows: of the whole batch, by the graph and the tensor of this rank's.
        assigned: mirrored variables without `aggregation` that the step has
            assigned, other than by an optimizer.
        later: components of variables whose values on the ranks become one
            at the end of the step.
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
    merges_rows: bool = False
    checking: bool = False
    whole: bool = False
    rows: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict)
    assigned: list[Any] = dataclasses.field(default_factory=list)
    later: list[Any] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def on_whole_batch(self) -> Iterator[None]:
        """What is computed inside is computed on the whole batch."""
        outer, self.whole = self.whole, True
        try:
            yield
        finally:
            self.whole = outer

    def inner_graphs(self) -> list[tf.Graph]:
        """Graphs within the step's that are being traced, outermost first.

        Of functions of the user's, which are kept and may be called again, in
        this step and in others, and of branches and loops.
        """
        graphs = internals.graphs_within(self.graph)
        return graphs[1:] if self.is_function else graphs

    def inner_function(self) -> tf.Graph | None:
        """The innermost `tf.function` within the step that is being traced."""
        functions = filter(internals.is_function, self.inner_graphs())
        return next(reversed(list(functions)), None)

    def checks_here(self) -> list[tf.Tensor]:
        """Those of `checks` that a variable must not be written before.

        Those of a function or a branch within are not known outside of it:
        that fails as a whole.
        """
        if tf.executing_eagerly():
            return []
        graphs = [self.graph, *internals.graphs_within(self.graph)]
        return [check for check in self.checks if check.graph in graphs]

    def copied(self, graph: tf.Graph) -> Step:
        """A copy of the step, for a trace that must not change it.

        Args:
            graph: of that trace.
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
        if hasattr(value, "nrows"):  # of RaggedTensor and PrefetchedIds
            return tf.cast(value.nrows(), tf.float32)
        if tf.is_tensor(value) and value.shape.rank != 0:
            if value.shape.rank and value.shape[0] is not None:
                return tf.constant(float(value.shape[0]))
            return tf.cast(tf.shape(value)[0], tf.float32)
    return tf.constant(1.0)


def is_keras_loop(fn: Any) -> bool:
    """Whether `fn`, given to `Strategy.run`, is a step of Keras's loops.

    Other methods of a model are steps of the user's own loops.
    """
    fn = getattr(fn, "python_function", fn)
    method = inspect.unwrap(fn)
    owner = getattr(method, "__self__", None)
    # That of a method which is a tf.function.
    owner = getattr(owner, "target", owner)
    if isinstance(owner, tf.keras.Model):
        return getattr(method, "__name__", None) in _KERAS_STEPS
    module = getattr(fn, "__module__", None) or ""
    return module.split(".")[0] in ("keras", "tf_keras")


def is_gradient_reduction(step: Step | None) -> bool:
    """Whether an all-reduce asked for now is one of gradients.

    Sums asked for while a tape records belong to the forward pass (a
    synchronised batch normalisation, for example).

    Args:
        step: under way, if any.
    """
    forward = step is not None and step.forward
    return not (forward or internals.is_recording())
