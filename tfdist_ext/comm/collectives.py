# SPDX-License-Identifier: Apache-2.0
"""Exchanges of one strategy: tags, gradient buckets, sample weights."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.calls import Tags
from tfdist_ext.comm.calls import Trial
from tfdist_ext.comm.gpus import TableGpus
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.comm.requests import Place
from tfdist_ext.comm.requests import Requests
from tfdist_ext.ops import collective_ops
from tfdist_ext.ops.checkpoint_ops import Grouped
from tfdist_ext.tables.problem import Machine
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Model

# Gradients are summed in buckets of about this size (tensor fusion, as in
# Horovod). A bucket is large enough to use the full bandwidth. It is small
# enough that the first one is sent while the backward pass still computes the
# next ones.
_BUCKET_BYTES = 8 << 20


def buckets_of(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Groups tensors into buckets; returns the indices of each bucket.

    Buckets that are ready first come first. The tensors of a bucket have one
    dtype.
    """
    # The order is reversed because later variables get their gradients first.
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
        model: model whose method is called.
        samples: samples of a rank in a step, None if unknown.
    """

    model: Model
    samples: int | None


class Collectives:
    """The exchanges of one strategy over its process group.

    Every exchange has a label. The tag on the wire is computed from the label,
    its occurrence within the step, and the function that is the step. Ranks
    therefore agree on tags without communication, in whatever order their
    executors run the ops.

    Attributes:
        group: process group that sends and receives.
        gradient_dtype: dtype in which gradients of mirrored variables are sent.
        call_lock: call lock for the calls outside of steps.
        machine: measured machine, which plans are made for; None before.
        rank_speeds: measured speed of each rank, which plans are made for; None
            before.
        gpus: memory that tables may use on GPUs, the same on all ranks.
        loop: outermost running loop of Keras, None without one.
        corrects: whether steps of Keras's loops are corrected for each rank
            having a part of the batch. Tests turn it off to see what a check
            finds.
        check: when steps and replicas are compared, see `checking`.
        drifted: names of variables that are known to differ between ranks.
        trial: trial that steps are traced or run for, None in training.
        ops: module with the exchange ops; this package's by default.
        keeps_rows: whether gradients of table rows stay on the rank that
            computes them, see `deferred_rows`.
        row_copies: copies of rows that this rank has, see `RowCopies`; None
            without `row_cache`.
        requests: what ranks serve to each other; None if all ranks run the
            same step.
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
        self.rank_speeds: tuple[float, ...] | None = None
        self.gpus = TableGpus(reason="the ranks were started without GPUs")
        self.loop: Loop | None = None
        self.corrects = True
        self.check = "auto"
        self.drifted: set[str] = set()
        self.trial: Trial | None = None
        self.ops: collective_ops.Ops = collective_ops
        self.keeps_rows = False
        self.row_copies: Any = None
        self.requests: Requests | None = None
        self._known_exchanges: set[tuple[str, ...]] = set()
        self._places = weakref.WeakKeyDictionary[tf.Graph, str]()
        self._depth = 0  # nested joint calls
        self._labels = weakref.WeakKeyDictionary[
            tf.Graph, dict[str, collections.Counter[str]]
        ]()

    @property
    def step(self) -> Step | None:
        """The step being traced or run, None outside of `Strategy.run`."""
        if not self._steps or calls.dataset_functions():
            return None
        # The stock strategy traces in a thread of its own, with the strategy
        # active. If another thread calls a layer during that time, the call is
        # not in the step.
        mine = self._stepping_thread == threading.get_ident()
        return self._steps[-1] if mine or active() is self else None

    def samples(self) -> tf.Tensor:
        """Samples of this rank in the current step, a float32 scalar.

        A `tf.function` that the step calls is cached and may be called in
        another step. There it gets the samples of that step.
        """
        step = self.step
        if step is None:  # in a function that a step called first
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
                "would run in another order on each rank. Let one thread of "
                "the program train, evaluate and predict."
            )
        self._stepping_thread = me
        if step.graph is not None:
            # Keras unrolls several steps of `predict` in one graph. TensorFlow
            # may run them in any order, so their tags must differ.
            of_graph = self._labels.setdefault(step.graph, {})
            step.labels = of_graph.setdefault(step.role, step.labels)
        # This does nothing in Keras's loops, which are joint calls themselves.
        with self.joint_call(f"step `{step.role}`", own_error_first=True):
            self._steps.append(step)
            try:
                yield step
            finally:
                self._steps.pop()
            if step.exchanges and not tf.executing_eagerly():
                # The same numbered lines and the same role give the same tags.
                lines = (f"step {step.role}", *step.exchanges)
                self._compare_exchanges(lines)

    @contextlib.contextmanager
    def trying(self, trial: Trial) -> Iterator[None]:
        """Makes steps that are traced or run in the context part of a trial.

        Args:
            trial: trial that records the updates of the steps.
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
        """Does not count exchanges traced in the context.

        The graph of the exchanges never runs.

        Args:
            graph: graph that they are traced in.
        """
        assert self.step is not None
        self._steps.append(self.step.copied(graph))
        try:
            yield
        finally:
            self._steps.pop()

    @contextlib.contextmanager
    def joint_call(
        self,
        what: str,
        end_barrier: bool = False,
        steps: bool = True,
        own_error_first: bool = False,
    ) -> Iterator[None]:
        """A joint call: it ends when all ranks are done or one has failed.

        When a rank raises inside, the other ranks raise its error at their next
        exchange, or in the exchange in which they wait. The group remains
        usable, and all ranks start the next joint call at the same point. A
        joint call inside of another one has no effect of its own.

            with collectives.joint_call("save 'path'"):
                write_my_part()
                collectives.barrier("written")
                if collectives.group.rank == 0:
                    put_into_place()
                collectives.barrier("in place")

        Args:
            what: description of the call, for errors on the other ranks.
            end_barrier: whether each rank waits at the end for all others.
            steps: whether functions with exchanges may run inside.
            own_error_first: whether an error raised on this rank takes
                precedence over an earlier error of another rank.

        Raises:
            tf.errors.AbortedError: "rank 1 (host:port): save 'path' failed:
                OSError: ...", if another rank has failed.
        """
        # The depth is not per thread: TensorFlow runs a replica in a thread of
        # its own.
        outermost = self._depth == 0
        left = ""
        if outermost:
            left = self._catch_up(raises=not own_error_first)
            if steps:
                self.group.will_leave(True)
        self._depth += 1
        try:
            yield
            if left:
                raise tf.errors.AbortedError(None, None, left)
            if outermost and end_barrier:
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
        """Ends the current joint call on all ranks; another may follow.

        A rank that is in an exchange of this call, or comes to one, raises
        there. It then gives up the call as well, before ranks start the next
        one.

        Args:
            what: description of the call.
            error: why it is given up.
        """
        self.group.leave(f"{what} failed: {calls.brief_error(error)}")

    def _exchanging(
        self, label: str
    ) -> contextlib.AbstractContextManager[None]:
        """A context for an exchange; outside of a joint call, it is one."""
        if self._depth == 0 and tf.executing_eagerly():
            return self.joint_call(label, steps=False)
        return contextlib.nullcontext()

    def _catch_up(self, raises: bool) -> str:
        """Leaves the joint call that another rank left, and raises its error.

        If an operation has failed with that error already, it is not raised
        again. If not `raises`, a new error is returned, to be raised later.
        """
        reason, reported = self.group.left()
        if not reason:
            return ""
        text = f"rank {self.group.rank}: {reason}"
        if not reported and not raises:
            return text
        self.group.leave(reason)
        if not reported:
            raise tf.errors.AbortedError(None, None, text)
        return ""

    def _compare_exchanges(self, lines: tuple[str, ...]) -> None:
        # All ranks trace new exchanges at the same step. If only shapes are
        # new, as in a smaller last batch, the lines are known already and are
        # not compared again.
        if lines not in self._known_exchanges:
            with tf.init_scope():
                self.group.check_same(list(lines))
            self._known_exchanges.add(lines)

    def place_of(self, layer: Layer) -> str:
        """Unique name for the state of a layer, as layer names may repeat."""
        if layer not in self._places:
            self._places[layer] = f"{layer.name}/{next(calls.place_numbers)}"
        return self._places[layer]

    def tag(self, label: str, kind: str, dtype: tf.DType) -> int:
        """Even number for an exchange, the same on all ranks.

        Raises:
            ValueError: the ranks run steps of their own.
        """
        step = self.step
        alone = step is not None and step.asynchronous
        # While a step is traced, all ranks exchange what they create.
        if alone and not tf.executing_eagerly():
            raise ValueError(
                f"A step of consistency.SSP or consistency.BAP needs "
                f"'{label}' ({kind}) of all ranks, which may be in other "
                "steps. This is so for losses and metrics that see the whole "
                "batch, synchronized=True, numbers that a `train_step` adds "
                "up over the ranks, and dynamic vocabularies. Use losses and "
                "metrics of Keras, or consistency.BSP()."
            )
        return self._tags.take(step, label, kind, dtype)

    def place_of_request(
        self, label: str, dtype: tf.DType, server: str, bounded: bool = False
    ) -> Place:
        """A kind of request of the current step, the same on all ranks.

        Args:
            label: names the requests in errors and statistics.
            dtype: dtype of the replies.
            server: names what serves the requests. Lookups of two models may
                have one label, and their optimizers too.
            bounded: see `Place`.
        """
        tag = self._tags.take(
            self.step, f"{label} of {server}", "request", dtype
        )
        return Place(tag, label, dtype, bounded)

    @contextlib.contextmanager
    def one_call(
        self, label: str
    ) -> Iterator[Callable[[Sequence[tf.Tensor]], None]]:
        """Groups several exchanges into one call, see `calls.CallLock`.

        Steps run one after the other anyway. Functions and loops within a step
        may run several times in parallel.

        Args:
            label: label of one of the exchanges.

        Yields:
            A function to be called with the results.
        """
        if self.step is not None and not self.step.inner_graphs():
            yield lambda results: None
            return
        with self.call_lock.hold(self._tags.place(self.step, label)) as end:
            yield end

    def occurrence(self, label: str) -> int:
        """Number of exchanges of the step with this label so far."""
        return self._tags.occurrence(self.step, label)

    def all_reduce(
        self,
        tensors: Sequence[tf.Tensor],
        label: str,
        weighted: bool = False,
        unweighted: int = 0,
    ) -> list[tf.Tensor]:
        """Sums tensors over the ranks, bitwise equal on all ranks.

        Args:
            tensors: dense tensors of any numeric dtypes.
            label: names the exchange in errors.
            weighted: whether to multiply every rank's tensors by its share of
                the step's samples, times `world_size`, before the sum.
            unweighted: number of the last tensors that are summed without
                weights.

        Returns:
            The sums, in order.
        """
        result: list[tf.Tensor] = list(tensors)
        first_plain = len(result) - unweighted
        for bucket in buckets_of(tensors):
            plain = [i for i in bucket if i >= first_plain]
            indices = [i for i in bucket if i < first_plain] + plain
            dtype = tensors[indices[0]].dtype
            with self._exchanging(label):
                sums = self.ops.all_reduce(
                    self.group,
                    [tensors[i] for i in indices],
                    tag=self.tag(label, "all_reduce", dtype),
                    label=label,
                    weight=self.samples() if weighted and self.step else None,
                    unweighted=len(plain),
                )
            for i, total in zip(indices, sums, strict=True):
                result[i] = total
        return result

    def share_of_samples(self, label: str) -> tf.Tensor | None:
        """This rank's share of the step's samples, times `world_size`.

        Args:
            label: label of the value that is weighted by the share.

        Returns:
            float32 scalar, 0 if no rank has samples; None outside of a step.
        """
        if self.step is None:
            return None
        samples = self.samples()
        (total,) = self.all_reduce([samples], f"{label}/samples")
        return tf.math.divide_no_nan(samples * self.group.world_size, total)

    def all_gather(self, tensor: tf.Tensor, label: str) -> tf.Tensor:
        """Concatenates the ranks' tensors along axis 0; sizes may differ."""
        return self.all_gather_parts(tensor, label)[0]

    def all_gather_parts(
        self, tensor: tf.Tensor, label: str
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers; also returns int64 `[world_size]`, the rows of each rank."""
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
            The slices that this rank received, in the order of the ranks, and
            int64 `[world_size]`, the rows received from each rank.
        """
        with self._exchanging(label):
            return self.ops.all_to_all(
                self.group,
                tensor,
                send_splits,
                tag=self.tag(label, "all_to_all", tensor.dtype),
                label=label,
            )

    def assign_piece(
        self,
        variable: tf.Variable,
        found: Grouped,
        rows: np.ndarray,
        error: str,
        label: str,
    ) -> None:
        """Assigns a piece of a table, see `collective_ops.assign_piece`.

        It uses the process group with engine="horovod" too.
        """
        with self._exchanging(label):
            collective_ops.assign_piece(
                self.group,
                variable,
                found,
                rows,
                error,
                tag=self.tag(label, "assign_piece", found.own.dtype),
                label=label,
            )

    def all_to_all_beside_steps(
        self, label: str, dtype: tf.DType
    ) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        """An all-to-all for a thread that runs beside steps.

        It uses the process group with engine="horovod" too.

        Args:
            label: names the exchange in errors.
            dtype: dtype of the values.

        Returns:
            A function with the arguments and results of `all_to_all`, without
            the label. One thread of each rank may call it, any number of times.
            It raises `tf.errors.AbortedError` once the current joint call has
            failed. It has no timeout, as a rank may be slow to write; it ends
            if a rank is lost.
        """
        return functools.partial(
            collective_ops.all_to_all,
            self.group,
            tag=self.tag(label, "all_to_all", dtype),
            label=label,
            generation=self.group.generation,
        )

    def sum_over_peers(
        self, tensor: tf.Tensor, peers: Sequence[int], label: str
    ) -> tf.Tensor:
        """Sums a tensor over some of the ranks; every rank must call.

        Args:
            tensor: float `[n]`, with the same n on all ranks of a group.
            peers: ranks of this rank's group, including itself, in the same
                order on all of them; empty for a rank in no group.
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
        # All variables have one tag. Ranks that create different variables then
        # take part in the same exchange, see the two names, and fail at once.
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
                # Rank 0 has not waited for other ranks. The barrier ensures
                # that either all ranks create the variable or, if one fails
                # before, none does.
                self.barrier("initial_value/all")
            elif value is not tensor:
                value.set_shape(tensor.shape)
            return value

    def barrier(self, label: str) -> None:
        """Waits until all ranks have called it."""
        with self._exchanging(label):
            tag = self.tag(label, "barrier", tf.float32)
            collective_ops.barrier(self.group, tag=tag, label=label)


def active() -> Collectives | None:
    """Collectives of the strategy in scope; None in one process."""
    return getattr(tf.distribute.get_strategy(), "collectives", None)
