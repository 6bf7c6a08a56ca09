# SPDX-License-Identifier: Apache-2.0
"""The comparison of kernels, without FBGEMM."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from benchmarks import kernel_batches
from benchmarks import kernels

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def measure(tmp_path, run_forking):
    """Runs the benchmark; returns what it printed, and its records."""

    def run(*arguments):
        output = tmp_path / "records.json"
        done = run_forking(
            *("benchmarks.kernels", "--workloads", "smoke", *arguments),
            *("--threads", "1", "--rounds", "1", "--output", output),
            ranks=1,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, json.loads(output.read_text())

    return run


@pytest.mark.parametrize("optimizer", kernels.OPTIMIZERS)
def test_ours_and_stock(optimizer, measure):
    """They compute the same, or the run would end with an error."""
    printed, records = measure("--optimizers", optimizer)
    assert "fbgemm: skipped (no --fbgemm-python)" in printed
    subjects = ["ours", "ours, true width", "stock"]
    if optimizer == "adam":
        subjects.remove("stock")
    assert [r["subject"] for r in records] == subjects
    for record in records:
        assert record["forward_ms"] > 0 and record["gathered_gb_s"] > 0


def test_other_widths_and_types(measure):
    printed, records = measure(
        *("--dims", "16", "--optimizers", "sgd"),
        *("--dtypes", "float32", "bfloat16"),
    )
    assert "; kernels for " in printed
    found = [(r["subject"], r["dim"], r["dtype"]) for r in records]
    assert found == [
        ("ours", 16, "float32"),
        ("stock", 16, "float32"),
        ("ours", 16, "bfloat16"),
    ]


def test_a_python_without_fbgemm_is_skipped_with_a_reason():
    reason = kernels.fbgemm_reason("no-such-python")
    assert reason and "no-such-python" in reason


@pytest.mark.parametrize(
    "optimizer, rows", [("sgd", 1), ("row_wise_adagrad", 0)]
)
def test_differences_are_found(optimizer, rows, tmp_path):
    case = kernel_batches.Case("smoke", optimizer)
    files = {}
    for name, shift in (("ours", 0.0), ("stock", 1.0), ("fbgemm", 0.0)):
        files[name] = tmp_path / f"{name}.npz"
        arrays = {"output 0": np.ones((2, 8)), "rows 0": np.ones((2, 8))}
        arrays["rows 0"][0, 0] += shift
        np.savez(files[name], **arrays)
    found = kernels.differences(case, files)
    assert len(found) == rows
    assert all(line.startswith("stock, rows 0: off by 1") for line in found)


def test_narrow_tables_are_columns_of_wide_ones():
    case = kernel_batches.Case("smoke", "sgd")
    wide = kernel_batches.weights(case, 1, 4)
    np.testing.assert_array_equal(
        kernel_batches.weights(case, 1, 3), wide[:, :3]
    )
    wide = kernel_batches.gradients(case, 2, 4, 1)
    np.testing.assert_array_equal(
        kernel_batches.gradients(case, 2, 3, 1), wide[:, :3]
    )
