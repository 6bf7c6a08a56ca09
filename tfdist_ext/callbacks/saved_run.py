# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: model, optimizer, data position, random generators."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import itertools
import json
import logging
import os
import random
import socket
import sys
import time
import uuid
import warnings
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks.data_position import Position
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.saving import checkpoint_files
from tfdist_ext.saving import saver
from tfdist_ext.saving.changed_rows import ChangedRows
from tfdist_ext.saving.changed_rows import Marks
from tfdist_ext.saving.checkpoint_files import Opened
from tfdist_ext.saving.checkpoint_reading import raise_on_all_ranks
from tfdist_ext.saving.saver import BackgroundWrite
from tfdist_ext.type_names import JsonObject
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model

_LOG = logging.getLogger("tfdist_ext")


def random_states() -> JsonObject:
    """The states of Python's and NumPy's generators, as JSON values."""
    state: Any = np.random.get_state(legacy=False)
    inner = {
        field: value.tolist() if isinstance(value, np.ndarray) else value
        for field, value in state["state"].items()
    }
    return {
        "python": random.getstate(),
        "numpy": {**state, "state": inner},
    }


def set_random_states(states: JsonObject) -> None:
    """Restores the generator states that `random_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    now: Any = np.random.get_state(legacy=False)
    if states["numpy"]["bit_generator"] == now["bit_generator"]:
        np.random.set_state(states["numpy"])


LOCK_NAME = "resume.lock"
# Time to wait for the lock, for a previous job that is just ending.
LOCK_SECONDS = 5.0
_HELD = {errno.EACCES, errno.EAGAIN}


class FolderLock:
    """A lock on a folder, held until `close` or the end of the process.

    It is a POSIX record lock: child processes do not inherit it, and NFS
    supports it.

    Args:
        folder: folder to lock, in a file system of this host; it is created.
            Other locations, such as "gs://...", are not locked.

    Raises:
        OSError: another process holds the lock. The message has its host,
            process id and start time. A file system without locks only causes a
            warning.
    """

    def __init__(self, folder: str) -> None:
        self._file = -1
        if "://" in folder:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            self._file = os.open(os.path.join(folder, LOCK_NAME), flags, 0o666)
            held = not self._take()
        except OSError as error:
            _LOG.warning(
                "Resume: '%s' cannot be locked (%s). Make sure that no other "
                "job saves there.",
                *(folder, error),
            )
            self.close()
            return
        if held:
            text = os.pread(self._file, 1000, 0).decode(errors="replace")
            self.close()
            raise OSError(
                f"Resume: '{folder}' is in use by {text or 'another process'}."
                " Two jobs would overwrite each other's checkpoints. End the "
                "other job, or give this one another directory."
            )
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"process {os.getpid()} on host {socket.gethostname()}"
        with contextlib.suppress(OSError):  # if the disk is full
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{text} since {started}".encode(), 0)

    def _take(self) -> bool:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in _HELD:
                    raise
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)

    def close(self) -> None:
        """Releases the lock."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


# Keys of every object-based checkpoint, and of those of a run.
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_PROGRESS = "progress/.ATTRIBUTES/py_state"
# Share of changed bytes, above which a warning says that deltas save little.
_LARGE_SHARE = 0.5
NOTHING = -1  # no write is under way; other phases are of `BackgroundWrite`


class _Text(tf.train.experimental.PythonState):
    """A text that is stored in a checkpoint."""

    text = ""

    def serialize(self) -> str:
        return self.text

    def deserialize(self, string_value: bytes | str) -> None:
        self.text = tf.compat.as_text(string_value)


@dataclasses.dataclass(frozen=True)
class _Base:
    """The full checkpoint that the next deltas are relative to.

    Attributes:
        id: id of the full checkpoint, "" for none.
        step: step at which it was made.
        marks: marks of this rank's rows at that step, None if no deltas follow.
        deltas: number of deltas written since.
    """

    id: str = ""
    step: int = 0
    marks: Marks | None = None
    deltas: int = 0


class SavedRun:
    """Writes and reads the checkpoints of one call of `fit`.

    Args:
        model: model that is trained, built.
        directory: folder of the checkpoints; the value of rank 0 is used.
        keep: number of checkpoints to keep.
        deltas: number of deltas between two full checkpoints.
        collectives: collectives of the strategy; None in one process.

    Attributes:
        path: path of the checkpoint that was last restored or written, ""
            before.
        step: step at which that checkpoint was made, 0 before.
        failure: why the last write failed, "" if it succeeded.
        seconds: seconds that training waited to start saves.
    """

    def __init__(
        self,
        model: Model,
        directory: str,
        keep: int,
        deltas: int,
        collectives: Collectives | None,
    ) -> None:
        hold(Need.CHECKPOINTS, self)
        self._collectives = collectives
        self._rank = collectives.group.rank if collectives else 0
        self._directory = text_of_first_rank(
            directory, collectives, "resume/directory"
        )
        self._keep = keep
        self._deltas = deltas
        self._base = _Base()
        self._writing: BackgroundWrite | None = None
        self._pending = self._base
        self._has_warned = False
        self.path = self.failure = ""
        self.step = self._begun_step = 0
        self.seconds = 0.0
        _build(model)
        self._lock: FolderLock | None = None
        self._take_lock()
        self._progress = _Text()
        self._checkpoint = tf.train.Checkpoint(
            model=model,
            optimizer=model.optimizer,
            progress=self._progress,
            more=keras_internals.untracked_variables(model),
        )

    def _take_lock(self) -> None:
        """Locks the folder on rank 0; if that fails, all ranks raise."""
        refusal = ""
        if self._rank == 0:
            try:
                self._lock = FolderLock(self._directory)
            except OSError as error:
                refusal = str(error)
        refusal = text_of_first_rank(refusal, self._collectives, "resume/lock")
        if refusal:
            raise OSError(refusal)

    def close(self) -> None:
        """Unlocks the folder."""
        if self._lock is not None:
            self._lock.close()

    def restore(self) -> tuple[Position, dict[str, float]] | None:
        """Restores the last complete checkpoint; all ranks must call.

        Returns:
            The position at which it was made, and the metrics then; None if
            there is no checkpoint.

        Raises:
            OSError: there are checkpoints, but none can be read.
        """
        if self._rank == 0:
            checkpoint_files.remove_unfinished(self._directory)
        listed = json.dumps(
            [
                [
                    (each.step, each.since)
                    for each in checkpoint_files.found_in(self._directory)
                ],
                self._failures_of_index() if self._rank == 0 else [],
            ]
        )
        text = text_of_first_rank(listed, self._collectives, "resume/steps")
        steps, failures = json.loads(text)
        for found in itertools.starmap(checkpoint_files.Checkpoint, steps):
            path = found.path(self._directory)
            try:
                full = self._open(found)
                with saver.relative_to(full):
                    status = self._checkpoint.read(path)
                status.assert_existing_objects_matched()
            except tf.errors.UnavailableError:  # a rank has ended
                raise
            except tf.errors.OpError as error:
                failures.append(f"{path}: {error.message}")
                warnings.warn(
                    f"'{path}' cannot be read and is left out: {error.message}",
                    stacklevel=2,
                )
                continue
            self.path = path
            position, logs = self._take_progress()
            self.step = position.step
            return position, logs
        if failures:
            raise OSError(
                f"None of the checkpoints in '{self._directory}' can be read:\n"
                + "\n".join(failures)
                + "\nGive Resume another directory to start anew."
            )
        return None

    def _failures_of_index(self) -> list[str]:
        """Warns of checkpoints without an index file; returns the lost ones.

        A checkpoint is lost if its index file was removed after it was
        complete.
        """
        failures = []
        for found, complete in checkpoint_files.without_index(self._directory):
            path = found.path(self._directory)
            _LOG.warning(
                "'%s' is left out: its index file is missing. %s",
                path,
                "It was removed or lost after the checkpoint was complete."
                if complete
                else "It was not written to the end, or the file was removed.",
            )
            if complete:
                failures.append(f"{path}: its index file is missing")
        return failures

    def _open(self, found: checkpoint_files.Checkpoint) -> str | None:
        """Reads the indexes on every rank, before any rank reads more.

        Returns:
            The path of the full checkpoint that a delta needs, else None.
        """
        failure = None
        path, full = found.path(self._directory), None
        try:
            progress = _progress_in(path)
            if found.since is not None:
                full = found.full.path(self._directory)
                if _progress_in(full).get("id") != progress["since"]:
                    raise ValueError(
                        f"It is a delta to an earlier '{full}', which has "
                        "been replaced."
                    )
        except (tf.errors.OpError, ValueError) as error:
            failure = tf.errors.DataLossError(None, None, str(error))
        raise_on_all_ranks(failure, self._collectives)
        return full

    def _take_progress(self) -> tuple[Position, dict[str, float]]:
        progress = json.loads(self._progress.text)
        every = progress["random"]
        set_random_states(every[self._rank % len(every)])
        place = Position(**progress["place"])
        # Seeds do not change the order of a stream.
        other_seed = progress["seed"] != internals.global_seed()
        if other_seed and place.stream is None:
            warnings.warn(
                f"'{self.path}' was made with TensorFlow's seed "
                f"{progress['seed']}, but the seed is now "
                f"{internals.global_seed()}. Shuffled data have another "
                "order, so some samples of the epoch are read twice. Call "
                "tf.keras.utils.set_random_seed before you create the "
                "strategy.",
                stacklevel=2,
            )
        return place, progress["logs"]

    @property
    def phase(self) -> int:
        """Phase of this rank's current write, `NOTHING` without one."""
        return self._writing.phase if self._writing else NOTHING

    def begin(
        self, position: Position, logs: Logs, whole: bool = False
    ) -> None:
        """Starts to save the state, which a thread writes; all ranks must call.

        Args:
            position: position in the data.
            logs: result of the last step, or None.
            whole: whether the checkpoint must be a full one.
        """
        base = self._base
        if whole or base.marks is None or base.deltas >= self._deltas:
            base = _Base()
        changed = ChangedRows(base.marks) if self._deltas else None
        since = None if base.marks is None else base.step
        made = checkpoint_files.Checkpoint(position.step, since)
        self._begun_step = position.step
        own = uuid.uuid4().hex  # the id of rank 0 is written
        self._progress.text = json.dumps(
            {
                "id": own,
                "since": base.id,
                "place": dataclasses.asdict(position),
                "logs": _numbers(logs),
                "seed": internals.global_seed(),
                "random": self._random_states(),
            }
        )
        self._writing = BackgroundWrite(
            self._checkpoint,
            made.path(self._directory),
            self._collectives,
            lambda: checkpoint_files.keep_last(
                self._directory, self._keep, made.step
            ),
            changed,
        )
        self.seconds += self._writing.seconds
        self._pending = dataclasses.replace(base, deltas=base.deltas + 1)
        if since is None:
            marks = changed.now if changed is not None else None
            self._pending = _Base(own, position.step, marks)
        elif changed is not None:
            self._warn_of_large_deltas(changed.share)

    def advance(self, phases: list[int]) -> None:
        """Advances the current write by a phase; all ranks must call.

        Args:
            phases: phases of all ranks.
        """
        if self._writing is None:
            return
        failure = self._writing.advance(phases)
        if failure is None:
            return
        if failure and not self.failure and self._rank == 0:  # warn once
            _LOG.warning(
                "'%s' could not be written, training goes on without it: %s",
                *(self._writing.path, failure),
            )
        self.failure = failure
        if not failure:
            self.path = self._writing.path
            self.step = self._begun_step
            self._base = self._pending
        self._writing = None

    def lost(self, step: int) -> str:
        """Text saying that a step is not on the disk, and what is.

        Args:
            step: step that training has reached.
        """
        last = f"there is no checkpoint in '{self._directory}'"
        if self.path:
            last = f"the last checkpoint is '{self.path}'"
        return (
            f"step {step} could not be saved: {self.failure}; {last}: "
            f"{step - self.step} steps are lost"
        )

    def _warn_of_large_deltas(self, share: float) -> None:
        """Warns once if most of the bytes of the model have changed."""
        if share <= _LARGE_SHARE or self._has_warned or self._rank:
            return
        self._has_warned = True
        warnings.warn(
            f"{share:.0%} of the model's bytes have changed since the last "
            "full checkpoint, so deltas save little. Optimizers of Keras change"
            " every row in each step if they have momentum or weight decay; "
            "those of tfdist_ext.optimizers only the rows of a batch. Make "
            f"full checkpoints more often than every {self._deltas + 1}th "
            "time, or leave `deltas` out.",
            stacklevel=2,
        )

    def wait(self, seconds: float) -> None:
        """Waits for the thread of this rank, for at most `seconds`."""
        if self._writing is not None:
            self._writing.join(seconds)

    def _random_states(self) -> list[JsonObject]:
        mine = json.dumps(random_states()) + "\n"
        if self._collectives is None:
            return [json.loads(mine)]
        gathered = self._collectives.all_gather(
            tf.constant(np.frombuffer(mine.encode(), np.uint8)), "resume/random"
        )
        lines = gathered.numpy().tobytes().splitlines()
        return [json.loads(line) for line in lines]


def _progress_in(path: str) -> JsonObject:
    """Reads the progress in a checkpoint, after checking its index."""
    opened = Opened(path)
    opened.tensor(_GRAPH)
    found: JsonObject = json.loads(opened.tensor(_PROGRESS))
    return found


def _build(model: Model) -> None:
    """Creates the optimizer's slots, which a checkpoint is read into.

    Raises:
        ValueError: the model is not built, or the optimizer has no `build`.
    """
    optimizer = model.optimizer
    if not model.built:
        raise ValueError(
            f"Resume needs a model that is built: '{model.name}' creates its "
            "variables in the first step. Begin it with keras.Input, or call "
            "model.build(input_shape)."
        )
    if not hasattr(optimizer, "build"):
        raise ValueError(
            "Resume needs an optimizer of Keras that can be built. Received: "
            f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        )
    if not keras_internals.is_built(optimizer):
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _numbers(logs: Logs) -> dict[str, float]:
    """The scalars in the result of a step."""
    found = {}
    for name, value in (logs or {}).items():
        array = np.asarray(value)
        if array.ndim == 0 and array.dtype.kind in "fiu":
            found[name] = float(array)
    return found


def print_line(text: str) -> None:
    """Writes a line to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
