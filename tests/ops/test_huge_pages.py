# SPDX-License-Identifier: Apache-2.0
"""Large tables lie on huge pages, which Linux gives on request."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

SETTING = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import mmap
import pathlib
import numpy as np
import tensorflow as tf
from tfdist_ext.ops import lookup_ops, optimizer_ops

def huge():
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if "AnonHuge" in l) // 1024

control = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
control.madvise(mmap.MADV_HUGEPAGE)
before = huge()
control.write(bytes(64 << 20))
given = huge() - before
control.close()

before = huge()
block = lookup_ops.init_rows(
    rows=2**20, row_part=0, row_parts=1, local_rows=2**20, first_column=0,
    local_dim=16, seed=0, distribution="constant", a=1.0,
)
made = huge()
table = tf.Variable(np.ones((2**20, 16), np.float32))
rows = tf.constant([1, 2**20 - 1], tf.int64)
rule = optimizer_ops.sgd(learning_rate=0.5)
optimizer_ops.update_rows(rule, table, [], rows, tf.ones([2, 16]))
assert np.count_nonzero(table.numpy() - 1) == 32
print("MB", given, made - before, huge() - made)
"""


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(),
    reason="needs Linux with transparent huge pages on request",
)
@pytest.mark.skipif(
    "asan" in os.environ.get("TFDIST_LIBRARY", ""),
    reason="the sanitizer's memory has huge pages anyway",
)
@pytest.mark.parametrize("wanted", ["1", "0"])
def test_initial_rows_and_updated_tables(wanted):
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TFDIST_HUGE_PAGES": wanted},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    given, made, exchanged = map(int, run.stdout.split()[-3:])
    if wanted == "0":
        assert made == exchanged == 0
    elif given < 32:
        pytest.skip("the system has no huge pages to give")
    else:
        # 64 MB each; kernels before 6.1 do not exchange pages at once.
        assert made >= 32
        release = tuple(map(int, os.uname().release.split(".")[:2]))
        assert exchanged >= 32 or release < (6, 1)
