# SPDX-License-Identifier: Apache-2.0
"""The callback that writes one trace of all ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks.update_watch import collectives_of
from tfdist_ext.launch import trace
from tfdist_ext.launch.trace import Event
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.type_names import JsonObject
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T

keras = tf.keras

_ROUNDS = 20  # exchanges that compare the clocks
_LOG = logging.getLogger("tfdist_ext")


class Timeline(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Writes what all ranks do in some steps into one trace, on one clock.

    The file is for Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing).
    For every rank it has the steps, the ops that the rank ran, and the time in
    callbacks. It also has the exchanges, with their bytes by peer, and with the
    time that they waited for the last rank.

    `tfdist-report trace FILE` says what bounds the steps.

    Ranks compare their clocks by 20 exchanges before the first traced step; the
    file has the largest possible error. In other steps the callback does
    nothing.

    Give it to `fit` on every rank:

        model.fit(data, callbacks=[Timeline("trace.json")])

    Args:
        path: path of the file, which rank 0 writes.
        steps: first traced step, counted from 0 at the start of `fit`, and the
            step after the last traced one.
        kernels: whether TensorFlow's profiler records ops, too. A process can
            run only one profiler at a time.

    Raises:
        ValueError: `steps` is an empty or negative range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: tuple[int, int] = (100, 110),
        kernels: bool = True,
    ) -> None:
        super().__init__()
        first, end = steps
        if not 0 <= first < end:
            raise ValueError(
                "Argument `steps` of Timeline must be the first step and the "
                f"one after the last. Received: steps={steps!r}"
            )
        self._path = os.fspath(path)
        self._first, self._end = first, end
        self._kernels = kernels
        hold(Need.TIMELINE, self)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Starts to count steps."""
        self._collectives = collectives_of(self.model)
        self._rank = 0
        if self._collectives is not None:
            self._rank = self._collectives.group.rank
        self._step = 0
        self._on = False
        self._events: list[Event] = []

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Starts the trace before the first traced step."""
        self._begun = batch
        if self._step == self._first and not self._on:
            self._start()
            self._since = time.monotonic_ns()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Writes the trace after the last traced step."""
        self._number = self._step
        self._step += batch - self._begun + 1
        if self._on and self._step >= self._end:
            self._note_end()
            self._stop()

    def callbacks_begin(self) -> None:
        """Called before the callbacks at the begin or end of a step."""
        self._since = time.monotonic_ns()

    def callbacks_end(self, ends_step: bool) -> None:
        """Called after the callbacks at the begin or end of a step.

        Args:
            ends_step: whether they were the callbacks at the end.
        """
        if not self._on:
            return
        if ends_step:
            self._note_end()
        else:
            self._began = self._since
            self._note_callbacks(f"begin of step {self._step}")

    def _note_callbacks(self, name: str) -> None:
        now = time.monotonic_ns()
        self._note(trace.CALLBACK, name, self._since, now, {})

    def _note_end(self) -> None:
        name = f"step {self._number}"
        self._note_callbacks(f"end of {name}")
        self._note(trace.STEP, name, self._began, time.monotonic_ns(), {})

    def on_train_end(self, logs: Logs = None) -> None:
        """Writes the trace so far, if training ends within the traced steps."""
        if self._on:
            self._stop()
        elif self._step <= self._first:
            _LOG.warning(
                "Timeline wrote nothing to '%s': training has ended after %d "
                "steps, before step %d.",
                *(self._path, self._step, self._first),
            )

    def _start(self) -> None:
        self._on = True
        self._offset, self._errors = self._clock()
        if self._kernels:
            self._folder = tempfile.TemporaryDirectory(prefix="tfdist")
            options = tf.profiler.experimental.ProfilerOptions(
                host_tracer_level=1, python_tracer_level=0
            )
            tf.profiler.experimental.start(self._folder.name, options)
        if self._collectives is not None:
            self._collectives.group.trace(True)

    def _clock(self) -> tuple[float, list[float]]:
        """Offset of this clock, nanoseconds; errors by rank, microseconds."""
        if self._collectives is None:
            return 0.0, [0.0]
        times = np.zeros([1, _ROUNDS, 2], np.int64)
        for each in times[0]:
            each[0] = time.monotonic_ns()
            self._collectives.all_gather(tf.zeros([1]), "timeline/clock")
            each[1] = time.monotonic_ns()
        everyone = self._collectives.all_gather(
            tf.constant(times), "timeline/clocks"
        ).numpy()
        sent, received = (everyone[:, :, i].T.tolist() for i in (0, 1))
        found = trace.clock_offsets(sent, received)
        return found[self._rank][0], [error / 1e3 for _, error in found]

    def _stop(self) -> None:
        self._on = False
        if self._collectives is not None:
            for each in self._collectives.group.trace(False):
                more = {
                    "kind": each.kind,
                    "call": f"{each.tag}/{each.call}",
                    "bytes_sent": sum(each.sent),
                    "bytes_received": sum(each.received),
                    "sent_to": _by_rank(each.sent),
                    "received_from": _by_rank(each.received),
                }
                kind = trace.EXCHANGE
                self._note(kind, each.label, each.start, each.end, more)
        if self._kernels:
            tf.profiler.experimental.stop()
            # The profiler's clock is the time of day.
            ahead = time.time_ns() - time.monotonic_ns()
            with self._folder:
                for op, start, end in internals.profiled_ops(self._folder.name):
                    self._note(trace.KERNEL, op, start - ahead, end - ahead, {})
        events = self._of_all_ranks()
        if self._rank:
            return
        waited = trace.waits(events)
        for event in events:
            if id(event) in waited:
                microseconds, last = waited[id(event)]
                event.more["waited_us"] = round(microseconds, 3)
                event.more["came_last"] = f"rank {last}"
        trace.write(self._path, events, self._errors)

    def _note(
        self, kind: str, name: str, start: float, end: float, more: JsonObject
    ) -> None:
        begin, over = ((time - self._offset) / 1e3 for time in (start, end))
        self._events.append(Event(self._rank, kind, name, begin, over, more))

    def _of_all_ranks(self) -> list[Event]:
        if self._collectives is None:
            return self._events
        mine = json.dumps([dataclasses.astuple(each) for each in self._events])
        gathered, sizes = self._collectives.all_gather_parts(
            tf.constant(np.frombuffer(mine.encode(), np.uint8)),
            "timeline/events",
        )
        text = gathered.numpy().tobytes()
        ends = np.cumsum(sizes.numpy())
        parts = [
            text[end - size : end]
            for end, size in zip(ends, sizes.numpy(), strict=True)
        ]
        return [Event(*each) for part in parts for each in json.loads(part)]


def _by_rank(sizes: Sequence[int]) -> dict[str, int]:
    """Bytes by peer, without peers that have none."""
    return {f"rank {rank}": size for rank, size in enumerate(sizes) if size}


def time_begin(
    original: Original[T],
    called: tf.keras.callbacks.CallbackList,
    *args: Any,
    **kwargs: Any,
) -> T:
    return _timed(original, called, False, *args, **kwargs)


def time_end(
    original: Original[T],
    called: tf.keras.callbacks.CallbackList,
    *args: Any,
    **kwargs: Any,
) -> T:
    return _timed(original, called, True, *args, **kwargs)


def _timed(
    original: Original[T],
    called: tf.keras.callbacks.CallbackList,
    ends_step: bool,
    *args: Any,
    **kwargs: Any,
) -> T:
    timelines = [e for e in called.callbacks if isinstance(e, Timeline)]
    for each in timelines:
        each.callbacks_begin()
    result = original(called, *args, **kwargs)
    for each in timelines:
        each.callbacks_end(ends_step)
    return result
