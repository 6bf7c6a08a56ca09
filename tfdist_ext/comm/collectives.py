# SPDX-License-Identifier: Apache-2.0
"""Collectives of one strategy: tags, plans, fused buckets, sample weights."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.calls import Tags
from tfdist_ext.comm.calls import Trial
from tfdist_ext.comm.gpus import TableGpus
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops
from tfdist_ext.tables.problem import Machine

# Gradients are summed in buckets of about this size: large enough to use the
# link, small enough that the first bucket travels while the backward pass
# still computes the next ones (tensor fusion, Horovod).
_BUCKET_BYTES = 8 << 20


def buckets_of(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Indices of the tensors that travel together, what is ready first first.

    Tensors of a bucket have one dtype.
    """
    # Later variables get their gradients first, hence the reverse order.
    result: list[list[int]] = []
    sizes: dict[tf.DType, int] = {}
    current: dict[tf.DType, list[int]] = {}
    for i in reversed(range(len(tensors))):
        tensor = tensors[i]
        size = (tensor.shape.num_elements() or 1) * tensor.dtype.size
        full = sizes.get(tensor.dtype, _BUCKET_BYTES) + size > _BUCKET_BYTES
        if full:
            current[tensor.dtype] = []
            sizes[tensor.dtype] = 0
            result.append(current[tensor.dtype])
        current[tensor.dtype].append(i)
        sizes[tensor.dtype] += size
    return result


@dataclasses.dataclass(frozen=True)
class Loop:
    """A call of `fit`, `evaluate` or `predict`.

    Attributes:
        model: whose method it is.
        samples: of a rank in a step, None if nothing tells.
    """

    model: Any
    samples: int | None


class Collectives:
    """The exchanges of one strategy over its process group.

    Every exchange has a label. Label, occurrence within the step and the
    function that is the step give the tag on the wire, so ranks agree on tags
    without talking, whatever order their executors run the ops in.

    Attributes:
        group: the process group that carries the exchanges.
        gradient_dtype: in which gradients of mirrored variables travel.
        call_lock: of the calls outside of steps.
        machine: what plans are made for, once it is measured.
        gpus: what tables may have of them, the same on all ranks.
        loop: of Keras, the outermost that runs.
        corrects: whether steps of Keras's loops are corrected for the ranks'
            parts of the batch. Tests turn it off to see what a check finds.
        check: when steps and replicas are compared, see `checking`.
        drifted: names of variables that ranks are known to differ in.
        trial: for which steps are traced or run now, None for training.
        ops: what carries tensors; this package unless told otherwise.
    """

    def __init__(
        self, group: ProcessGroup, gradient_dtype: tf.DType = tf.float32
    ) -> None:
        self.group = group
        self.gradient_dtype = gradient_dtype
        self._steps: list[Step] = []
        self._stepping_thread = 0
        self.call_lock = calls.CallLock()
        self._tags = Tags(self.call_lock)
        self.machine: Machine | None = None
        self.gpus = TableGpus(reason="the ranks were started without")
        self.loop: Loop | None = None
        self.corrects = True
        self.check = "auto"
        self.drifted: set[str] = set()
        self.trial: Trial | None = None
        self.ops: collective_ops.Ops = collective_ops
        self._known_exchanges: set[tuple[str, ...]] = set()
        self._places = weakref.WeakKeyDictionary[Any, str]()
        self._depth = 0  # of `together`
        self._labels = weakref.WeakKeyDictionary[
            tf.Graph, dict[str, collections.Counter[str]]
        ]()

    @property
    def step(self) -> Step | None:
        """The step being traced or run, None outside of `Strategy.run`."""
        if not self._steps or calls.dataset_functions():
            return None
        # The stock strategy traces in a thread of its own, in its context; a
        # thread of the user that calls a layer meanwhile is in no step.
        mine = self._stepping_thread == threading.get_ident()
        return self._steps[-1] if mine or active() is self else None

    def samples(self) -> tf.Tensor:
        """float32 scalar, samples of this rank in the current step.

        A `tf.function` within the step is kept and may be called in another
        one: there it gets the samples of that.
        """
        step = self.step
        if step is None:  # of a function that a step has called first
            return tf.constant(1.0)
        function = step.inner_function()
        if function is None:
            return step.samples
        return internals.at_every_call(
            function, "samples", step.samples, self.samples
        )

    @contextlib.contextmanager
    def stepping(self, step: Step) -> Iterator[Step]:
        """Makes `step` the current one; compares its exchanges when traced."""
        me = threading.get_ident()
        if self._steps and self._stepping_thread != me:
            raise RuntimeError(
                "Two threads run or trace a step of one strategy at once "
                f"(`{self._steps[-1].role}`, `{step.role}`). Their exchanges "
                "would meet in another order on every rank: let one thread "
                "of the program train, evaluate and predict."
            )
        self._stepping_thread = me
        if step.graph is not None:
            # Keras unrolls several steps of `predict` in one graph. TensorFlow
            # may run them in any order, so their tags must differ.
            of_graph = self._labels.setdefault(step.graph, {})
            step.labels = of_graph.setdefault(step.role, step.labels)
        # In Keras's loops, which are more than a step, that does nothing.
        with self.together(f"step `{step.role}`", own_first=True):
            self._steps.append(step)
            try:
                yield step
            finally:
                self._steps.pop()
            if step.exchanges and not tf.executing_eagerly():
                # With their numbers and its role the tags are equal too.
                lines = (f"step {step.role}", *step.exchanges)
                self._compare_exchanges(lines)

    @contextlib.contextmanager
    def trying(self, trial: Trial) -> Iterator[None]:
        """Steps traced or run inside are of a trial.

        Args:
            trial: that notes what they do.
        """
        outer = self.trial
        try:
            self.trial = trial
            with trial.marking():
                yield
        finally:
            self.trial = outer

    @contextlib.contextmanager
    def capturing(self, graph: tf.Graph) -> Iterator[None]:
        """Exchanges traced inside are not counted: their graph never runs.

        Args:
            graph: that they are traced in.
        """
        assert self.step is not None
        self._steps.append(self.step.copied(graph))
        try:
            yield
        finally:
            self._steps.pop()

    @contextlib.contextmanager
    def together(
        self,
        what: str,
        all_end: bool = False,
        steps: bool = True,
        own_first: bool = False,
    ) -> Iterator[None]:
        """What all ranks do together, until all have or one has failed.

        When a rank raises inside, the others learn its error at their next
        exchange, or in the one where they wait for it, and the group stays
        usable: the next thing that the ranks do finds them in step. Inside
        of another one this does nothing; the outermost counts.

            with collectives.together("save 'path'"):
                write_my_part()
                collectives.barrier("written")
                if collectives.group.rank == 0:
                    put_into_place()
                collectives.barrier("in place")

        Args:
            what: is done, for the errors of the other ranks.
            all_end: whether no rank shall go on before all have come to the
                end.
            steps: whether functions with exchanges may be run inside.
            own_first: whether an error that this rank meets by itself counts
                before one that another has met already.

        Raises:
            tf.errors.AbortedError: "rank 1 (host:port): save 'path' failed:
                OSError: ...", if another rank has failed.
        """
        # Not by thread: TensorFlow runs a replica in a thread of its own.
        outermost = self._depth == 0
        left = ""
        if outermost:
            left = self._catch_up(raises=not own_first)
            if steps:
                self.group.will_leave(True)
        self._depth += 1
        try:
            yield
            if left:
                raise tf.errors.AbortedError(None, None, left)
            if outermost and all_end:
                self.barrier(f"end of {what}")
        except BaseException as error:
            if outermost:
                self.give_up(what, error)
            raise
        finally:
            self._depth -= 1
            if outermost and steps:
                self.group.will_leave(False)

    def give_up(self, what: str, error: BaseException) -> None:
        """Ends on all ranks what they do together; they may do another thing.

        Whoever is in an exchange, or comes to one, raises there and gives up
        as well, before the ranks can meet in the other thing.

        Args:
            what: is given up.
            error: why.
        """
        self.group.leave(f"{what} failed: {calls.brief_error(error)}")

    def _exchanging(
        self, label: str
    ) -> contextlib.AbstractContextManager[None]:
        """A context for an exchange: alone, it is done `together`."""
        if self._depth == 0 and tf.executing_eagerly():
            return self.together(label, steps=False)
        return contextlib.nullcontext()

    def _catch_up(self, raises: bool) -> str:
        """Leaves what another rank has left; says so if nobody knows yet."""
        reason, told = self.group.left()
        if not reason:
            return ""
        text = f"rank {self.group.rank}: {reason}"
        if not told and not raises:
            return text
        self.group.leave(reason)
        if not told:
            raise tf.errors.AbortedError(None, None, text)
        return ""

    def _compare_exchanges(self, lines: tuple[str, ...]) -> None:
        # Ranks trace new exchanges at the same step; those that only have new
        # shapes (a last, smaller batch) are known already and cost nothing.
        if lines not in self._known_exchanges:
            with tf.init_scope():
                self.group.check_same(list(lines))
            self._known_exchanges.add(lines)

    def place_of(self, layer: Any) -> str:
        """A name for what is kept for a layer; names of layers may repeat."""
        if layer not in self._places:
            self._places[layer] = f"{layer.name}/{next(calls.place_numbers)}"
        return self._places[layer]

    def tag(self, label: str, kind: str, dtype: tf.DType) -> int:
        """Even number for an exchange, the same on all ranks."""
        return self._tags.take(self.step, label, kind, dtype)

    @contextlib.contextmanager
    def one_call(
        self, label: str
    ) -> Iterator[Callable[[Sequence[tf.Tensor]], None]]:
        """Several exchanges that belong together, see `calls.CallLock`.

        Steps come one after the other by themselves; functions and loops
        within a step may be run several times at once.

        Args:
            label: of one of the exchanges.

        Yields:
            A function to be given the results.
        """
        if self.step is not None and not self.step.inner_graphs():
            yield lambda results: None
            return
        with self.call_lock.hold(self._tags.place(self.step, label)) as end:
            yield end

    def occurrence(self, label: str) -> int:
        """How many exchanges of the step had the label so far."""
        return self._tags.occurrence(self.step, label)

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], label: str, weighted: bool = False
    ) -> list[tf.Tensor]:
        """Sums tensors over the ranks, bitwise equal on all of them.

        Args:
            tensors: dense tensors of any numeric dtypes.
            label: names the exchange in errors.
            weighted: multiply every rank's tensors by its share of the
                step's samples times `world_size` before the sum.

        Returns:
            The sums, in order.
        """
        result: list[tf.Tensor] = list(tensors)
        for indices in buckets_of(tensors):
            dtype = tensors[indices[0]].dtype
            with self._exchanging(label):
                sums = self.ops.all_reduce(
                    self.group,
                    [tensors[i] for i in indices],
                    tag=self.tag(label, "all_reduce", dtype),
                    label=label,
                    weight=self.samples() if weighted and self.step else None,
                )
            for i, total in zip(indices, sums, strict=True):
                result[i] = total
        return result

    def share_of_samples(self, label: str) -> tf.Tensor | None:
        """This rank's share of the step's samples times `world_size`.

        Args:
            label: of what is weighed by it.

        Returns:
            float32 scalar, 0 if no rank has samples; None outside of a step.
        """
        if self.step is None:
            return None
        samples = self.samples()
        (total,) = self.all_reduce([samples], f"{label}/samples")
        return tf.math.divide_no_nan(samples * self.group.world_size, total)

    def all_gather(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Concatenates the ranks' tensors along axis 0, uneven allowed."""
        return self.all_gather_parts(tensor, label)[0]

    def all_gather_parts(
        self, tensor: tf.Tensor, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers; also returns int64 `[world_size]`, the rows of each."""
        with self._exchanging(label):
            return self.ops.all_gather(
                self.group,
                tensor,
                tag=self.tag(label, "all_gather", tensor.dtype),
                label=label,
            )

    def all_to_all(
        self, tensor: tf.Tensor, send_splits: tf.Tensor, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends slice j of `tensor` to rank j.

        Args:
            tensor: `[n, ...]`, the slices for rank 0, 1, ... in order.
            send_splits: int64 `[world_size]`, rows of each slice.
            label: names the exchange in errors.

        Returns:
            What the ranks sent to this one, in their order, and int64
            `[world_size]`, the rows that came from each.
        """
        with self._exchanging(label):
            return self.ops.all_to_all(
                self.group,
                tensor,
                send_splits,
                tag=self.tag(label, "all_to_all", tensor.dtype),
                label=label,
            )

    def sum_over_peers(
        self, tensor: tf.Tensor, peers: Sequence[int], label: str
    ) -> tf.Tensor:
        """Sums a tensor over some of the ranks; every rank must call.

        Args:
            tensor: float `[n]`, with the same n on all ranks of a group.
            peers: the ranks of this rank's group, it included, ascending or
                not but alike on all of them; empty for a rank in no group.
            label: names the exchange in errors.

        Returns:
            `[n]`, bitwise equal on all ranks of the group.
        """
        size = tf.size(tensor, tf.int64)
        splits = [
            size if rank in peers else tf.zeros([], tf.int64)
            for rank in range(self.group.world_size)
        ]
        parts, _ = self.all_to_all(
            tf.tile(tensor, [len(peers)]), tf.stack(splits), label
        )
        if not peers:
            return tensor
        return tf.reduce_sum(tf.reshape(parts, [len(peers), -1]), axis=0)

    def initial_value(self, tensor: tf.Tensor, variable: str) -> tf.Tensor:
        """Rank 0's initial value of a variable, on every rank."""
        # One tag for all variables: ranks that create different ones meet
        # in the same exchange, see the two names, and fail at once.
        label = f"initial_value/{variable}"
        with self._exchanging(label):
            value = collective_ops.broadcast(
                self.group,
                tensor,
                root=0,
                tag=self.tag("initial_value", "broadcast", tensor.dtype),
                label=label,
            )
            if tf.executing_eagerly():
                # Rank 0 has not waited for anybody. All ranks shall have the
                # variable or, if one fails before it, none.
                self.barrier("initial_value/all")
            elif value is not tensor:
                value.set_shape(tensor.shape)
            return value

    def barrier(self, label: str) -> None:
        """Ends when all ranks have come here."""
        with self._exchanging(label):
            tag = self.tag(label, "barrier", tf.float32)
            collective_ops.barrier(self.group, tag=tag, label=label)


def active() -> Collectives | None:
    """Collectives of the strategy in scope; None with a single process."""
    return getattr(tf.distribute.get_strategy(), "collectives", None)
