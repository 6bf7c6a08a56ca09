# SPDX-License-Identifier: Apache-2.0
"""Tables of more than 2^31 elements: offsets do not fit 32 bits.

Skipped where memory is short: such a table takes gigabytes, unless most of
it is never written to, and has no memory then. Each is in a process of its
own, for TensorFlow keeps what it has once had: tests that come later would be
left without memory for the system's file cache.
"""

from __future__ import annotations

import os
import pathlib
import resource
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import optimizer_ops

ROWS, DIM = 2**25 + 5, 64
# On both sides of the elements 2^31 and 2^32 - 1 would wrap to.
NAMED = np.array([0, 3, 2**31 // DIM - 1, 2**31 // DIM + 1, ROWS - 1])


def free_gigabytes() -> float:
    """Memory that is free or can be had by dropping caches."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = dict(line.split(":") for line in lines)
    return int(sizes["MemAvailable"].split()[0]) / 2**20


@pytest.mark.parametrize(
    ("program", "gigabytes"),
    [("sgd_and_decay_of_bfloat16", 6.0), ("sgd_of_float32", 2.0)],
)
def test_in_a_process_of_its_own(program: str, gigabytes: float) -> None:
    free = free_gigabytes()
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GB of free memory, {free:.1f} are")
    root = str(pathlib.Path(__file__).parent.parent.parent)
    sanitizer = os.environ.get("ASAN_OPTIONS", "")
    done = subprocess.run(
        [sys.executable, __file__, program],
        env={
            **os.environ,
            "PYTHONPATH": root,
            # This would give memory to all of a table.
            "TFDIST_HUGE_PAGES": "0",
            # What is written to comes in larger pieces, and sooner.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            # New memory would not be zeros.
            "ASAN_OPTIONS": f"{sanitizer}:max_malloc_fill_size=0",
        },
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def make_table(dtype: tf.DType) -> tf.Variable:
    """Zeros: new memory, which is not there before it is written to."""
    assert ROWS * DIM > 2**31
    return tf.Variable(tf.raw_ops.Empty(shape=[ROWS, DIM], dtype=dtype))


def assert_only_named_rows_changed(table: tf.Variable, value: float) -> None:
    found = tf.cast(tf.gather(table, NAMED), tf.float32).numpy()
    np.testing.assert_array_equal(found, np.float32(value))
    # Where a 32-bit offset, signed or not, would have written instead.
    wrapped = [
        offset % 2**32 % (ROWS * DIM) // DIM
        for offset in (NAMED * DIM, (NAMED * DIM) - 2**31)
    ]
    others = np.setdiff1d(np.concatenate([*wrapped, NAMED + 1]), NAMED)
    others = others[others < ROWS]
    assert not tf.cast(tf.gather(table, others), tf.float32).numpy().any()


def count_numbers(table: tf.Variable, block: int = 2**17) -> int:
    """How many are not zero, of all rows; a copy of all would need memory."""
    starts = range(0, ROWS, block)
    rows = [np.arange(i, min(i + block, ROWS)) for i in starts]
    words = (
        np.asarray(tf.gather(table, some)).view(np.uint16) for some in rows
    )
    return sum(int(np.count_nonzero(each)) for each in words)


def sgd_and_decay_of_bfloat16() -> None:
    table = make_table(tf.bfloat16)
    grads = tf.fill([len(NAMED), DIM], -2.0)
    optimizer_ops.update_rows(
        optimizer_ops.sgd(learning_rate=1.0), table, [], NAMED, grads
    )
    assert_only_named_rows_changed(table, 2.0)
    optimizer_ops.scale_table(table, 0.5)
    assert_only_named_rows_changed(table, 1.0)
    assert count_numbers(table) == NAMED.size * DIM
    with pytest.raises(tf.errors.InvalidArgumentError, match="is outside the"):
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=1.0),
            table,
            [],
            np.array([ROWS]),
            tf.ones([1, DIM]),
        )


def sgd_of_float32() -> None:
    table = make_table(tf.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Unsorted and repeated: the grouping path.
    rows = np.concatenate([NAMED[::-1], NAMED])
    grads = tf.fill([len(rows), DIM], -1.0)
    optimizer_ops.update_rows(
        optimizer_ops.sgd(learning_rate=1.0), table, [], rows, grads
    )
    assert_only_named_rows_changed(table, 2.0)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 1e6, "the table has been copied"


if __name__ == "__main__":
    globals()[sys.argv[1]]()
