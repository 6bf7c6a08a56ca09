# SPDX-License-Identifier: Apache-2.0
"""Examples trained on GPUs, by one rank and by two, as on CPUs."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parents[2]
RANKS = (1, 2)
# Sums in another order, and products that a GPU rounds to fewer bits.
TOLERANCE = 0.01
LOSS = re.compile(r"\bloss: ([-+.\w]+)")
PREFIX = re.compile(r"\[(\d+)\] ")  # of lines of other ranks than 0
LIMIT = 1800
# What TensorFlow has to have, said by a process that ends with it.
QUESTION = """
import tensorflow as tf
from tfdist_ext import _build_info
print("cuda", tf.test.is_built_with_cuda(), _build_info.CUDA,
      len(tf.config.list_physical_devices("GPU")))
"""


@dataclasses.dataclass(frozen=True)
class Example:
    """A program of `examples/`, which makes its own data.

    Attributes:
        script: its file.
        arguments: of it.
        figures: what finds the losses in what it prints.
        every_rank: whether all ranks print them, or rank 0 alone.
        needs: a package that it cannot do without.
    """

    script: str
    arguments: tuple[str, ...] = ()
    figures: re.Pattern[str] = LOSS
    every_rank: bool = True
    needs: str = ""


# Pooled tables, many of them by a plan, sparse weights alone, sequences,
# crossed features and what is trained by Keras 2.
EXAMPLES = (
    Example("quickstart.py"),
    Example("many_tables.py", ("--epochs", "2", "--prefetch-ids")),
    Example(
        "libsvm_logistic.py",
        figures=re.compile(r"\btest loss: ([-+.\w]+)"),
        every_rank=False,
    ),
    Example(
        "sasrec.py",
        ("--epochs", "3"),
        figures=re.compile(r"\bto ([-+.\w]+)$", re.MULTILINE),
        every_rank=False,
    ),
    Example(
        "ctr.py",
        ("--rows", "20000", "--buckets", "16384", "--epochs", "2"),
        figures=re.compile(r"\bval_loss +([-+.\w]+)"),
        every_rank=False,
        needs="matplotlib",
    ),
    Example(
        "movielens.py",
        ("--epochs", "3"),
        figures=re.compile(r"\btest RMSE: ([-+.\w]+)"),
        every_rank=False,
        needs="tensorflow_recommenders",
    ),
)
# Runs an example on so many ranks, on "cpu" or "gpu"; what it prints.
Run = Callable[[Example, int, str], str]


@dataclasses.dataclass(frozen=True)
class Result:
    """One training on GPUs beside that on CPUs."""

    example: str
    ranks: int
    losses: tuple[float, ...]  # of the epochs
    expected: tuple[float, ...]  # on CPUs, by one rank
    seconds: float
    error: str = ""

    @property
    def right(self) -> bool:
        return (
            not self.error
            and len(self.losses) == len(self.expected) > 0
            and all(
                abs(loss - other) <= TOLERANCE * abs(other)
                for loss, other in zip(self.losses, self.expected, strict=True)
            )
        )


def missing() -> str:
    """Says why nothing can be trained on GPUs here; empty if it can."""
    done = subprocess.run(
        [sys.executable, "-c", QUESTION],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=LIMIT,
        check=False,
    )
    found = re.search(r"^cuda (\w+) (\w+) (\d+)$", done.stdout, re.MULTILINE)
    if found is None:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    if found[1] != "True":
        return "TensorFlow is built without CUDA"
    if found[2] != "True":
        return "tfdist_ext is built without CUDA (`TFDIST_CUDA=1 make build`)"
    return "" if int(found[3]) else "TensorFlow sees no GPU"


def run(example: Example, ranks: int, device: str) -> str:
    """Runs an example by `tfdist-run`.

    Raises:
        RuntimeError: it fails; the text is the end of what it said.
    """
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    # Ranks may have to share a GPU, of which each would take all memory.
    env["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
    if device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = "-1"
    script = str(ROOT / "examples" / example.script)
    command = [sys.executable, "-m", "tfdist_ext.launch", "-n", str(ranks)]
    with tempfile.TemporaryDirectory() as folder:  # for what it writes
        done = subprocess.run(
            [*command, script, *example.arguments],
            capture_output=True,
            text=True,
            env=env,
            cwd=folder,
            timeout=LIMIT,
            check=False,
        )
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return done.stdout


def losses_in(text: str, ranks: int, example: Example) -> tuple[float, ...]:
    """Finds what each rank prints, or rank 0 for all: all the same.

    Raises:
        RuntimeError: they do not.
    """
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for line in text.splitlines():
        rank = PREFIX.match(line)
        for found in example.figures.findall(line):
            losses[int(rank[1]) if rank else 0].append(float(found))
    if example.every_rank and any(each != losses[0] for each in losses):
        raise RuntimeError(f"the ranks print different losses: {losses}")
    return tuple(losses[0])


def check(
    run: Run = run, examples: Sequence[Example] = EXAMPLES
) -> Iterator[Result]:
    """Trains every example on CPUs once, and on GPUs by 1 and 2 ranks."""
    for example in examples:
        if example.needs and importlib.util.find_spec(example.needs) is None:
            print(f"{example.script}: left out, {example.needs} is missing")
            continue
        expected = losses_in(run(example, 1, "cpu"), 1, example)
        for ranks in RANKS:
            begin = time.monotonic()
            losses: tuple[float, ...] = ()
            error = ""
            try:
                printed = run(example, ranks, "gpu")
                losses = losses_in(printed, ranks, example)
            except (RuntimeError, subprocess.TimeoutExpired) as failure:
                error = str(failure)
            seconds = time.monotonic() - begin
            script = example.script
            yield Result(script, ranks, losses, expected, seconds, error)


def report(results: Iterator[Result], path: pathlib.Path) -> int:
    """Prints a line for each and writes them as CSV.

    Args:
        results: of `check`.
        path: of the CSV.

    Returns:
        How many are wrong.
    """
    wrong = 0
    print("example             ranks  seconds  loss     on a CPU")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["example", "ranks", "seconds", "losses", "expected", "right"]
        )
        for each in results:
            wrong += not each.right
            last = [
                f"{part[-1]:.4f}" if part else "none" for part in parts(each)
            ]
            print(
                f"{each.example:19} {each.ranks:5} {each.seconds:8.1f}  "
                f"{last[0]:7}  {last[1]:7}{'' if each.right else '  wrong'}",
                flush=True,
            )
            if each.error:
                print(each.error)
            losses = [" ".join(map(str, part)) for part in parts(each)]
            writer.writerow(
                [each.example, each.ranks, each.seconds, *losses, each.right]
            )
    print(f"written to {path}")
    return wrong


def parts(result: Result) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return result.losses, result.expected
