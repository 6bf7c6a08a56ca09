# SPDX-License-Identifier: Apache-2.0
"""Times lookup and update on a CPU: ours, stock TensorFlow, FBGEMM.

Results are compared first. Then the subjects take turns, a few steps each, so
that they see the same machine; a row of the table shows medians. `ours` has
rows as wide as FBGEMM's, which must be a multiple of 4. `copy` is the share
of the rate at which this many threads copy a large array. `call` is a lookup of
one sample: what TensorFlow or torch needs to call anything at all.

Ours and FBGEMM's are called without Python code of theirs, each as one op for
the lookup and one for the gradient with the update. Stock is a `tf.function`.
Stock has no Adam of rows, and FBGEMM none on CPUs. FBGEMM's tables are float16
where ours are bfloat16, and stock's gradient needs float32.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import kernel_batches
from benchmarks.kernel_batches import Case
from benchmarks.kernel_worker import SUBJECTS

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam")
# Torch's threads would spin while others use the cores, and its tables would
# lie on small pages.
FASTEST_TORCH = {"OMP_WAIT_POLICY": "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}
Times = dict[str, dict[str, list[float]]]


class Process:
    """A worker and the pipe to it."""

    def __init__(self, python: str, threads: int) -> None:
        # Closed in close().
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, "-m", "benchmarks.kernel_worker", str(threads)],
            cwd=ROOT,
            env=FASTEST_TORCH | os.environ | {"OMP_NUM_THREADS": str(threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        """Sends a command and waits for the answer.

        Raises:
            RuntimeError: the process ended instead.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(
            json.dumps({"do": do, **arguments}),
            file=self.process.stdin,
            flush=True,
        )
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(
                f"the worker ended during {do} {arguments}: "
                f"{self.log.read()[-4000:]}"
            )
        return json.loads(line)

    def close(self) -> None:
        """Lets it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def copy_rate(threads: int, megabytes: int = 256) -> float:
    """Gigabytes per second, read and written, of a copy of a large array."""
    source = np.ones(megabytes << 17)
    target = np.zeros_like(source)
    pairs = list(
        zip(
            np.array_split(target, threads),
            np.array_split(source, threads),
            strict=True,
        )
    )
    times = []
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for _ in range(7):
            start = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))
            times.append(time.perf_counter() - start)
    return 2 * source.nbytes / float(np.median(times)) / 1e9


def differences(case: Case, files: dict[str, pathlib.Path]) -> list[str]:
    """Names results that differ from ours beyond rounding."""
    found = []
    rtol, atol = 1e-3, 1e-4
    if case.dtype != "float32":
        # Sums of rows in float16 and in bfloat16, each with an error of 2^-9.
        hotness = max(table.hotness for table in case.tables)
        rtol, atol = 2**-6, 2e-2 * max(1.0, hotness**0.5 / 2)
    ours = np.load(files["ours"])
    for subject, path in files.items():
        theirs = np.load(path)
        for name in ours.files:
            if (
                subject in ("stock", "ours, true width")
                and name.startswith("rows")
                and case.optimizer == "row_wise_adagrad"
            ):
                continue  # Not row-wise; a mean over other columns.
            a, b = ours[name], theirs[name]
            width = min(a.shape[1], b.shape[1])
            if not np.allclose(a[:, :width], b[:, :width], rtol, atol):
                worst = abs(a[:, :width] - b[:, :width]).max()
                found.append(f"{subject}, {name}: off by {worst:.2g}")
    return found


def measure(
    processes: dict[str, Process], case: Case, rounds: int, repeats: int
) -> Times:
    """Checks, warms up and times all subjects in turns."""
    for subject, process in processes.items():
        process.ask("make", subject=subject, case=dataclasses.asdict(case))
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for i, (subject, process) in enumerate(processes.items()):
            files[subject] = pathlib.Path(folder) / f"{i}.npz"
            process.ask("check", subject=subject, path=str(files[subject]))
        wrong = differences(case, files)
    if wrong:
        raise SystemExit("results differ: " + "; ".join(wrong))
    keys = ("forward", "backward", "call")
    times: Times = {s: {key: [] for key in keys} for s in processes}
    for turn in range(rounds + 1):
        for subject, process in processes.items():
            answer = process.ask("time", subject=subject, repeats=repeats)
            if turn:  # The first is for warming up.
                for key, values in answer.items():
                    times[subject][key] += values
    return times


def show(case: Case, threads: int, times: Times, copy: float) -> list[Any]:
    """Prints one line per subject; returns them as records."""
    records = []
    middle = {
        subject: {key: float(np.median(v)) for key, v in each.items()}
        for subject, each in times.items()
    }
    for subject, each in middle.items():
        size = kernel_batches.forward_bytes(case, SUBJECTS[subject][2])
        rate = size / each["forward"] / 1e6
        line = f"{case.workload:<10}{case.optimizer:<17}{threads:>2}  "
        if case.dim is not None or case.dtype != "float32":
            line += f"{case.dim or '':>4} {case.dtype:<9}"
        line += f"{subject:<17}{each['forward']:>8.2f}{each['backward']:>8.2f}"
        line += f"{each['call']:>6.2f}"
        line += f"{rate:>7.1f}{rate / copy:>6.2f}"
        ratios = {}
        for other in ("fbgemm", "stock"):
            for key in ("forward", "backward"):
                value = middle.get(other, {}).get(key, float("nan"))
                ratios[f"{key} x {other}"] = value / each[key]
                line += f"{value / each[key]:>7.2f}"
        print(line, flush=True)
        records.append(
            {
                **dataclasses.asdict(case),
                "threads": threads,
                "processor": processor(),
                "subject": subject,
                "forward_ms": each["forward"],
                "backward_ms": each["backward"],
                "call_ms": each["call"],
                "gathered_gb_s": rate,
                "copy_gb_s": copy,
                **ratios,
            }
        )
    return records


def run_case(
    case: Case, threads: int, arguments: argparse.Namespace
) -> list[Any]:
    """Starts the processes of one case, measures and shows it."""
    tensorflow = Process(sys.executable, threads)
    processes = {"ours": tensorflow}
    if any(table.width % 4 for table in case.tables):
        processes["ours, true width"] = tensorflow
    if case.optimizer != "adam" and case.dtype == "float32":
        processes["stock"] = tensorflow
    if arguments.fbgemm_python and case.optimizer != "adam":
        processes["fbgemm"] = Process(arguments.fbgemm_python, threads)
    try:
        times = measure(processes, case, arguments.rounds, arguments.repeats)
    finally:
        for process in set(processes.values()):
            process.close()
    return show(case, threads, times, copy_rate(threads))


def fbgemm_reason(python: str | None) -> str | None:
    """Why FBGEMM cannot be compared with, or None if it can."""
    if not python:
        return "no --fbgemm-python"
    try:
        done = subprocess.run(
            [python, "-c", "import fbgemm_gpu, torch"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except OSError as error:
        return str(error)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def processor() -> str:
    """The processor, and the widest vectors that the kernels use on it."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    fields = dict(
        map(str.strip, line.split(":", 1))
        for line in text.split("\n\n")[0].splitlines()
        if ":" in line
    )
    flags = set(fields.get("flags", "").split())
    level = "SSE2"
    if {"avx2", "fma", "bmi2"} <= flags:
        level = "AVX2"
    if {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags:
        level = "AVX-512"
    family, model = fields.get("cpu family"), fields.get("model")
    name = fields.get("model name", "unknown")
    return f"{name}, family {family}, model {model}; kernels for {level}"


def cases(arguments: argparse.Namespace) -> Iterator[tuple[Case, int]]:
    """Cases to measure, with their numbers of threads."""
    for workload, optimizer, dim, dtype, threads in itertools.product(
        arguments.workloads,
        arguments.optimizers,
        arguments.dims,
        arguments.dtypes,
        arguments.threads,
    ):
        made = Case(
            workload, optimizer, arguments.batch_size, dim=dim, dtype=dtype
        )
        yield made, threads


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__
    )
    add = parser.add_argument
    add("--workloads", nargs="+", default=["timelines", "ads"])
    add(
        "--optimizers",
        nargs="+",
        default=["sgd", "row_wise_adagrad"],
        choices=OPTIMIZERS,
    )
    add(
        "--dims",
        nargs="+",
        type=int,
        default=[None],
        help="width of all tables, of at most 64 MiB in float32 (the "
        "workload's)",
    )
    add(
        "--dtypes",
        nargs="+",
        default=["float32"],
        choices=["float32", "bfloat16"],
    )
    add("--threads", nargs="+", type=int, default=[1, 2])
    add("--batch-size", type=int, default=256)
    add("--rounds", type=int, default=8, help="turns of every subject (8)")
    add("--repeats", type=int, default=5, help="steps in a turn (5)")
    add("--fbgemm-python", help="Python with torch and fbgemm-gpu-cpu")
    add("--output", type=pathlib.Path, help="file for the records, JSON")
    return parser


def main() -> None:
    """Runs all cases; prints the table."""
    arguments = make_parser().parse_args()
    reason = fbgemm_reason(arguments.fbgemm_python)
    if reason:
        print(f"fbgemm: skipped ({reason})")
        arguments.fbgemm_python = None
    print(f"processor: {processor()}")
    print(f"{'':31}{'':<17}{'fwd':>8}{'bwd+upd':>8}{'call':>6}", end="")
    print(f"{'gather':>7}{'':>6}{'x fbgemm':>14}{'x stock':>14}")
    print(f"{'':31}{'':<17}{'ms':>8}{'ms':>8}{'ms':>6}", end="")
    print(f"{'GB/s':>7}{'copy':>6}" + f"{'fwd':>7}{'bwd':>7}" * 2)
    records = []
    for case, threads in cases(arguments):
        records += run_case(case, threads, arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
