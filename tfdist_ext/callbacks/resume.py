# SPDX-License-Identifier: Apache-2.0
"""The callback that saves checkpoints in `fit` and resumes from the last."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import Literal

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.callbacks import data_position
from tfdist_ext.callbacks import saved_run
from tfdist_ext.callbacks.data_position import DataTracker
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.data import PositionedDataset
from tfdist_ext.data import generators
from tfdist_ext.launch.local_ranks import NOT_SAVED as NOT_SAVED
from tfdist_ext.type_names import EpochIterator
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T

keras = tf.keras
EXIT_CODE = 128 + signal.SIGTERM


class PreemptionSignals:
    """Records whether this process has received a preemption signal.

    Attributes:
        signal: name of the first signal received, "" before that.
    """

    def __init__(self) -> None:
        self.signal = ""

    @contextlib.contextmanager
    def recording(self, numbers: Sequence[signal.Signals]) -> Iterator[None]:
        """Records signals while the context is active.

        In a thread other than the main thread it does nothing, as Python allows
        signal handlers in the main thread only.

        Args:
            numbers: signals to record. Signals that are ignored, or that are
                handled outside of Python, keep their handlers.
        """
        self.signal = ""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        before = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
        watch = threading.Thread(
            target=self._watch, args=(theirs, frozenset(numbers)), daemon=True
        )
        watch.start()
        replaced = {}
        try:
            for number in numbers:
                if signal.getsignal(number) not in (None, signal.SIG_IGN):
                    replaced[number] = signal.signal(number, _wait)
            yield
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            ours.close()  # ends the thread
            watch.join()

    def _watch(self, source: socket.socket, numbers: frozenset[int]) -> None:
        with source:
            while received := source.recv(64):
                for number in received:
                    if number not in numbers:
                        continue
                    if self.signal:
                        sys.stderr.write("got a second signal: ends at once\n")
                        sys.stderr.flush()
                        os._exit(EXIT_CODE)
                    self.signal = signal.Signals(number).name


def _wait(number: int, frame: object) -> None:
    """Handles a signal by doing nothing, so that it ends no process."""


# Approximate time between two heartbeats.
HEARTBEAT_SECONDS = 0.5


class Heartbeats:
    """Heartbeats: when ranks exchange numbers, and the exchange itself.

    Args:
        collectives: collectives of the strategy; None in one process.
    """

    def __init__(self, collectives: Collectives | None) -> None:
        self._collectives = collectives
        self._steps = 0  # since the last heartbeat
        self._due = 1
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Counts a step; returns whether a heartbeat comes before it."""
        self._steps += 1
        return self._steps >= self._due

    def exchange(self, *mine: int) -> np.ndarray:
        """Sends numbers to all ranks; all ranks must call.

        Args:
            *mine: numbers of this rank.

        Returns:
            int64 `[world_size, len(mine)]`, the numbers of every rank.
        """
        numbers = np.array([[*mine, self._propose()]], np.int64)
        if self._collectives is not None:
            numbers = self._collectives.all_gather(
                tf.constant(numbers), "resume/heartbeat"
            ).numpy()
        self._due, self._steps = int(numbers[0, -1]), 0
        self._last = time.monotonic()
        return numbers[:, :-1]

    def _propose(self) -> int:
        """Proposes the number of steps until the next heartbeat.

        It at most doubles from one heartbeat to the next.
        """
        elapsed = max(time.monotonic() - self._last, 1e-6)
        steps = int(HEARTBEAT_SECONDS * self._steps / elapsed)
        return min(max(steps, 1), 2 * self._due)


# Longest time that a failed `fit` waits for the thread that writes.
_LAST_WRITE_SECONDS = 10.0


class Resume(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Saves checkpoints during `fit`, and resumes from the last one.

    Give it to `fit` on every rank. After a fault or SIGTERM, start the same
    program again. The model, the optimizer, the epoch, the position in the data
    and the random generators are restored from the last checkpoint, at another
    number of ranks too. At the same number of ranks the weights become those of
    an uninterrupted run, bit by bit.

        model.fit(data, epochs=9, callbacks=[Resume("run1", every=1000)])

    A `tfdist_ext.data.PositionedDataset`, and a Python iterator with
    `get_state` and `set_state`, continue at their position. Other data is read
    up to it.

    Checkpoints have TensorFlow's format. Each rank writes its own part, in a
    thread, from a snapshot of its shards; training waits only until the
    snapshot is taken and dense variables are copied.
    Every slice has a checksum. A damaged checkpoint is skipped, and the one
    before it is restored.

    On a preemption signal, such as SIGTERM, all ranks save before the same step
    and raise `SystemExit(143)` out of `fit`. A second signal ends the process
    at once. If the save fails, for example on a full disk, they raise
    `SystemExit(74)`.

    Args:
        directory: folder of the checkpoints, shared by all ranks and used by
            this run only. The value of rank 0 is used.
        every: batches between two checkpoints, or "epoch". One more checkpoint
            is made at the end of training.
        keep: number of full checkpoints to keep, and of deltas.
        deltas: number of deltas between two full checkpoints. A delta has only
            the rows of tables and slots that changed since the full checkpoint,
            so it is faster to write and read if few rows are trained in
            between. The checkpoint at the end of training is full.
        signals: signals that announce a preemption.

    Attributes:
        seconds: seconds that training waited in the last `fit`: to start saves,
            and at its end for unfinished writes.

    Raises:
        ValueError: `every` or `keep` is below 1, or `deltas` is below 0. In
            `fit`: the model is not built, or is not of a
            `HybridParallelStrategy`.
        OSError: in `fit`, if there are checkpoints but none can be read, if
            another job uses the folder, or if the state at the end of training
            could not be saved.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every: int | Literal["epoch"] = "epoch",
        keep: int = 3,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1),
        deltas: int = 0,
    ) -> None:
        super().__init__()
        if every != "epoch":
            _check_count("every", every, "'epoch' or a number of batches")
        _check_count("keep", keep, "a number")
        _check_count("deltas", deltas, "a number", least=0)
        self._directory = os.fspath(directory)
        self._every = every
        self._keep = keep
        self._deltas = deltas
        self._signals = tuple(signals)
        self._tracker: DataTracker | None = None
        self.seconds = 0.0

    @contextlib.contextmanager
    def during(
        self, model: Model, steps_per_epoch: int | None
    ) -> Iterator[None]:
        """Prepares a call of `fit`, and removes all its changes after it.

        Args:
            model: the model that is trained.
            steps_per_epoch: argument of `fit`.
        """
        strategy = _strategy_of(model)
        per_call = keras_internals.steps_of_call(model)
        self._tracker = tracker = DataTracker(strategy.collectives, per_call)
        self._one_iterator = steps_per_epoch is not None
        self._preemption = PreemptionSignals()
        distribute = strategy.experimental_distribute_dataset

        def distribute_tracked(
            dataset: tf.data.Dataset, *args: Any, **kwargs: Any
        ) -> tf.data.Dataset:
            own_data = data_position.is_own_data(dataset)
            found = distribute(dataset, *args, **kwargs)
            # The first dataset has the training data.
            return tracker.watch(found, own_data)

        strategy.experimental_distribute_dataset = distribute_tracked
        self._train: Any = None
        self._run: Any = None
        try:
            with self._preemption.recording(self._signals):
                yield
        finally:
            if self._run is not None:
                self._run.wait(_LAST_WRITE_SECONDS)
                self._run.close()
            tracker.stop()
            del strategy.experimental_distribute_dataset
            if self._train is not None:
                model.train_function = self._train
            keras_internals.start_at_epoch(model, None)
            keras_internals.keep_metrics(model, False)
            self._tracker = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Restores the last checkpoint, if there is one."""
        model = self.model
        collectives = _strategy_of(model).collectives
        assert self._tracker is not None
        self._run = saved_run.SavedRun(
            model, self._directory, self._keep, self._deltas, collectives
        )
        self._heartbeats = Heartbeats(collectives)
        self._logs: Any = None
        self._saved_step = self._batch = 0
        self._epoch_unsaved = False
        self._train = model.train_function
        model.train_function = self._step
        found = self._run.restore()
        if found is not None:
            position, self._logs = found
            self._tracker.go_to(position, self.params.get("steps"))
            self._saved_step = position.step
            keras_internals.start_at_epoch(model, position.epoch)
            # Keras would clear them when it begins the epoch.
            keras_internals.keep_metrics(model, position.batch > 0)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Records the number of the epoch."""
        assert self._tracker is not None
        keras_internals.keep_metrics(self.model, False)
        self._tracker.begin_epoch(epoch)
        self._epoch_unsaved = True

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Records the number of the next batch."""
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Records how many batches the step has trained."""
        assert self._tracker is not None
        self._tracker.trained(batch - self._batch + 1)

    def on_train_end(self, logs: Logs = None) -> None:
        """Saves once more, and waits until all is written."""
        assert self._tracker is not None
        position = self._tracker.position
        preempted = self._heartbeat()
        self._finish()
        if position.step != self._run.step:
            stopped = self.model.stop_training
            last = 0 if stopped else self.params.get("epochs", 0)
            self._tracker.end(max(position.epoch + 1, last), self._one_iterator)
            self._save(whole=True)
        self._finish()
        if preempted:
            self._stop()
        if position.step != self._run.step:
            raise OSError(f"Resume: {self._run.lost(position.step)}.")

    def _step(self, iterator: Iterator[Nest]) -> Logs:
        """Runs a training step; replaces the model's train function."""
        tracker = self._tracker
        assert tracker is not None
        tracker.enter(iterator, self._batch)
        wanted = self._is_due()
        if self._heartbeats.is_due() or wanted:
            if self._heartbeat():
                self._finish()
                if tracker.position.step != self._run.step:
                    self._save()
                    self._finish()
                self._stop()
            if wanted and self._run.phase == saved_run.NOTHING:
                self._save()
        self._logs = self._train(tracker.iterator)
        return self._logs

    def _is_due(self) -> bool:
        """Whether a checkpoint is due; it may wait for an unfinished one."""
        assert self._tracker is not None
        step = self._tracker.position.step
        if step == self._saved_step:
            return False
        due = self._epoch_unsaved
        if self._every != "epoch":
            assert isinstance(self._every, int)
            due = step // self._every > self._saved_step // self._every
        # To save in a round would end it, and so change what is trained.
        rounds = _strategy_of(self.model).extended.rounds
        return due and (rounds is None or rounds.are_complete())

    def _save(self, whole: bool = False) -> None:
        assert self._tracker is not None
        self._run.begin(self._tracker.counted(), self._logs, whole)
        self._saved_step = self._tracker.position.step
        self._epoch_unsaved = False
        self.seconds = self._run.seconds

    def _heartbeat(self) -> bool:
        """Makes a heartbeat; returns whether a rank got a preemption signal."""
        numbers = self._heartbeats.exchange(
            int(bool(self._preemption.signal)), self._run.phase
        )
        self._run.advance(numbers[:, 1].tolist())
        return bool(np.any(numbers[:, 0]))

    def _finish(self) -> None:
        """Waits until the current checkpoint is written, in short exchanges."""
        start = time.monotonic()
        while self._run.phase != saved_run.NOTHING:
            self._run.wait(1.0)
            self._heartbeat()
        self._run.seconds += time.monotonic() - start
        self.seconds = self._run.seconds

    def _stop(self) -> None:
        assert self._tracker is not None
        run, step = self._run, self._tracker.position.step
        name = self._preemption.signal
        saved = step == run.step
        code = EXIT_CODE if saved else NOT_SAVED
        done = f"saved '{run.path}'" if saved else run.lost(step)
        if name or not (saved or run.rank):
            got = name or "a signal on another rank"
            saved_run.print_line(
                f"Resume: got {got}; {done}; ends with exit code {code}"
            )
        raise SystemExit(code)


def without_trained_batches(original: Original[T], loop: EpochIterator) -> T:
    """Keras's loop over batches, without the batches trained before."""
    tracker = marks.watch(keras_internals.dataset_of(loop))
    return keras_internals.without_calls(
        original, loop, tracker.skips if tracker is not None else None
    )


def _check_count(name: str, value: object, what: str, least: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"Argument `{name}` of Resume must be {what} of at least {least}. "
            f"Received: {name}={value!r}"
        )


def _strategy_of(model: Model) -> Strategy:
    strategy = model.distribute_strategy
    if not hasattr(strategy, "collectives"):
        raise ValueError(
            "Resume needs a model of a HybridParallelStrategy: make and "
            "compile it within strategy.scope(), in one process too. "
            f"Received: a model of {type(strategy).__name__}."
        )
    return strategy


def skip_trained_batches(
    original: Original[T], model: Model, *args: Any, **kwargs: Any
) -> T:
    """Runs Keras's `fit`, prepared for the Resume among its callbacks."""
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    given = bound.arguments
    callbacks = given.get("callbacks") or ()
    callbacks = getattr(callbacks, "callbacks", callbacks)
    if not isinstance(callbacks, Sequence):
        callbacks = [callbacks]
    found = [each for each in callbacks if isinstance(each, Resume)]
    if not found:
        return original(model, *args, **kwargs)
    if len(found) > 1:
        raise ValueError(
            f"`fit` takes one Resume. Received: callbacks={callbacks}"
        )
    if generators.has_state(given.get("x")):
        given["x"] = PositionedDataset.from_generator(given["x"]).batches()
    with found[0].during(model, given.get("steps_per_epoch")):
        return original(*bound.args, **bound.kwargs)
