# SPDX-License-Identifier: Apache-2.0
"""A process that times kernels when told to, line by line.

Commands come as JSON on standard input, answers go to standard output:
`make` a subject, `check` it (one step; saves what it computed), `time` it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks import kernel_batches

# name: (module, class, padded to FBGEMM's width)
SUBJECTS = {
    "ours": ("kernel_tensorflow", "OursTables", True),
    "ours, true width": ("kernel_tensorflow", "OursTables", False),
    "stock": ("kernel_tensorflow", "StockTables", True),
    "fbgemm": ("kernel_fbgemm", "FbgemmTables", True),
}


class Worker:
    """Subjects of one process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.subjects: dict[str, Any] = {}
        self.steps: dict[str, int] = {}

    def make(self, subject: str, case: dict[str, Any]) -> None:
        """Builds tables and batches."""
        module_name, class_name, padding = SUBJECTS[subject]
        module = importlib.import_module(f"benchmarks.{module_name}")
        if not self.subjects:
            module.set_threads(self.threads)
        made = getattr(module, class_name)(kernel_batches.Case(**case), padding)
        self.subjects[subject] = made
        self.steps[subject] = 1

    def check(self, subject: str, path: str) -> None:
        """Saves results, and the touched rows after an update."""
        tables = self.subjects[subject]
        tables.reset()
        arrays = {}
        tables.forward(0)
        for i, output in enumerate(tables.outputs()):
            arrays[f"output {i}"] = np.array(output)
        tables.backward(0)
        for i in range(len(tables.tables)):
            rows = kernel_batches.touched(tables.case, i)
            arrays[f"rows {i}"] = tables.rows(i, rows)
        np.savez(path, **arrays)

    def time(self, subject: str, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of every forward, backward with update and call."""
        tables = self.subjects[subject]
        forward, backward, call = [], [], []
        for _ in range(repeats):
            step = self.steps[subject]
            self.steps[subject] = step + 1
            start = time.perf_counter()
            tables.forward(step)
            middle = time.perf_counter()
            tables.backward(step)
            end = time.perf_counter()
            tables.call()
            call.append(1e3 * (time.perf_counter() - end))
            forward.append(1e3 * (middle - start))
            backward.append(1e3 * (end - middle))
        return {"forward": forward, "backward": backward, "call": call}


def main() -> None:
    """Serves commands until the end of the input."""
    # Libraries may print: only answers go to the pipe.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker(int(sys.argv[1]))
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(worker, command.pop("do"))(**command)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
