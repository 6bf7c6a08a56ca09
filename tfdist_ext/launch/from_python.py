# SPDX-License-Identifier: Apache-2.0
"""Ranks that a notebook or another Python program starts and waits for."""

from __future__ import annotations

import codecs
import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import TypeVar

from tfdist_ext.launch import local_ranks

T = TypeVar("T")

CALL, RESULT = "call.pickle", "result.pickle"
_RANK = "tfdist_ext.launch.rank_of_python"
# Seconds from the end of an interrupted call until the ranks are killed.
_GRACE = 10
_TAIL = 4000  # characters of a rank's output in an error
_ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Failure:
    """What has ended a rank.

    Attributes:
        time: when, in nanoseconds of `time.time_ns`.
        kind: the type of the exception.
        message: its text.
        traceback: its traceback, as Python prints it.
        secondary: whether the rank ended because another one had.
    """

    time: int
    kind: str
    message: str
    traceback: str
    secondary: bool


def notebook(
    fn: Callable[..., T], args: Sequence[Any] = (), ranks: int = 2
) -> T:
    """Calls a function on new ranks of this host, and waits for them.

        def train(rate):
            strategy = tfdist_ext.HybridParallelStrategy()
            ...
            return history.history

        history = tfdist_ext.launch.notebook(train, args=(0.1,), ranks=2)

    Every rank is a new process, as with `tfdist-run`. So it does not matter
    whether TensorFlow has been used in this process, and nothing that the ranks
    create is left in it. The function, its arguments and its result are
    pickled; models and strategies cannot be, so create them in the function,
    and save models to files. What rank 0 prints is printed here.

    Args:
        fn: function that creates a strategy and trains. One that is defined in
            a notebook, in a program's main file or in another function needs
            the package `cloudpickle`.
        args: its arguments, the same on all ranks.
        ranks: the number of processes.

    Returns:
        What the function has returned on rank 0.

    Raises:
        RuntimeError: a rank has failed. The text begins with the rank that
            failed first, and has its traceback and last output. All other
            ranks have been stopped.
        ImportError: the function needs `cloudpickle`, which is not installed.
        TypeError: the function, an argument or the result cannot be pickled.
        ValueError: `ranks` is not positive, or this process is a rank itself.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(
            f"Argument `ranks` must be at least 1. Received: ranks={ranks!r}."
        )
    if "TF_CONFIG" in os.environ:
        raise ValueError(
            "launch.notebook starts the ranks of one host, and TF_CONFIG says "
            "that this process is a rank of a cluster. Call the function "
            "itself, or remove TF_CONFIG from os.environ."
        )
    with tempfile.TemporaryDirectory(prefix="tfdist-notebook-") as name:
        folder = pathlib.Path(name)
        (folder / CALL).write_bytes(_pickled(fn, tuple(args)))
        code, said = _run(folder, ranks)
        if code:
            raise RuntimeError(_reason(folder, ranks, code, said))
        found = pickle.loads((folder / RESULT).read_bytes())
    return found


def error_file(rank: int) -> str:
    """Returns the name of the file with a rank's `Failure`."""
    return f"rank-{rank}.error"


def output_file(rank: int) -> str:
    """Returns the name of the file with what a rank other than 0 prints."""
    return f"rank-{rank}.output"


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        import cloudpickle

        dumps = cloudpickle.dumps
    except ImportError:
        dumps = pickle.dumps
        name = getattr(fn, "__qualname__", "")
        if getattr(fn, "__module__", "") == "__main__" or "<" in name:
            raise ImportError(
                f"launch.notebook cannot send {name or fn!r} to other "
                "processes, because it is defined in a notebook, in the main "
                "file or in a function: pip install cloudpickle. Or import it "
                "from a module."
            ) from None
    try:
        pickled = dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"launch.notebook cannot pickle the function or its arguments: "
            f"{error}. Create models, strategies and datasets in the function, "
            "and do not use global ones in it."
        ) from error
    return pickle.dumps((list(sys.path), pickled))


def _run(folder: pathlib.Path, ranks: int) -> tuple[int, list[str]]:
    """Runs the ranks; returns the exit code and what the launcher said."""
    command = [sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)]
    command += ["--grace", str(_GRACE), "-m", _RANK, str(folder)]
    path = os.environ.get("PYTHONPATH", "")
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT),
    }
    # The output of a notebook is no file that a process could write.
    process = local_ranks.popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said: list[str] = []
    assert process.stdout is not None
    try:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        line = ""
        while data := os.read(process.stdout.fileno(), 1 << 16):
            text = decoder.decode(data)
            sys.stdout.write(text)
            sys.stdout.flush()
            *lines, line = (line + text).split("\n")
            said += [each for each in lines if each.startswith("tfdist-run:")]
        return process.wait(), said
    except BaseException:  # also an interrupted cell
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE + 5)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks end with it
        raise
    finally:
        process.stdout.close()


def _reason(
    folder: pathlib.Path, ranks: int, code: int, said: Sequence[str]
) -> str:
    failures: dict[int, Failure] = {}
    for rank in range(ranks):
        path = folder / error_file(rank)
        if path.exists():
            failures[rank] = Failure(**pickle.loads(path.read_bytes()))
    launcher = "\n".join(said)
    first = min(
        failures,
        key=lambda rank: (failures[rank].secondary, failures[rank].time),
        default=None,
    )
    if first is None or failures[first].secondary:
        # A rank that a signal has ended cannot say why.
        return (
            f"a rank of {ranks} ended without an error of Python (exit code "
            f"{code}): {launcher or 'the launcher said nothing'}"
            f"{_outputs(folder, range(1, ranks))}"
        )
    failure = failures[first]
    return (
        f"rank {first} of {ranks} failed: {failure.kind}: {failure.message}\n\n"
        f"{failure.traceback}{_outputs(folder, [first])}"
    )


def _outputs(folder: pathlib.Path, ranks: Sequence[int] | range) -> str:
    """The last lines that ranks have printed; rank 0's were shown."""
    text = ""
    for rank in ranks:
        path = folder / output_file(rank)
        if path.exists() and path.stat().st_size:
            printed = path.read_text(errors="replace")[-_TAIL:]
            text += f"\nLast output of rank {rank}:\n{printed}"
    return text
