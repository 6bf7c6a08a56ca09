# SPDX-License-Identifier: Apache-2.0
"""Speed and memory of checkpoints beside those of `dd`; started on every rank.

    tfdist-run -n 2 -m benchmarks.checkpoint_speed
    tfdist-run -n 4 -m benchmarks.checkpoint_speed --sharding column

Writes a table and its Adagrad slots as a `tf.train.Checkpoint`, reads them, and
compares every row with what was written. A write ends when the files are on
the disk (fsync). Before a read rank 0 drops the page cache, which needs root;
without it, or with --warm, reads are marked as warm. In each of three turns
`dd` writes and reads as many bytes, on rank 0 alone and in the same folder.

Columns: MB per second, also as a share of what `dd` reaches, and the most
memory that a rank needs besides, in MB: the peak of its resident memory less
what it had before.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import text_of_first_rank

keras = tf.keras
DIM, TURNS = 32, 3
MEGABYTE = 1e6


def make_parser() -> argparse.ArgumentParser:
    """Creates the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, default=2_000_000, help=f"of {DIM} columns")
    add("--sharding", default="row", help="placement of the table")
    add("--folder", help="on the disk to be measured (a temporary folder)")
    add("--warm", action="store_true", help="leave the page cache as it is")
    return parser


def drop_page_cache(warm: bool) -> bool:
    """Makes the next read come from the disk, unless it should be warm.

    Returns:
        Whether it does.
    """
    if warm:
        return False
    os.sync()
    try:
        pathlib.Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def of_dd(folder: str, size: int, warm: bool) -> tuple[float, float]:
    """Seconds in which `dd` writes `size` bytes with fsync, and reads them."""
    path = f"{folder}/dd"

    def seconds(*options: str) -> float:
        start = time.monotonic()
        subprocess.run(
            ["dd", "bs=8M", "iflag=fullblock,count_bytes", *options],
            check=True,
            capture_output=True,
        )
        return time.monotonic() - start

    written = seconds(
        "if=/dev/zero", f"of={path}", f"count={size}", "conv=fsync"
    )
    drop_page_cache(warm)
    read = seconds(f"if={path}", "of=/dev/null")
    pathlib.Path(path).unlink()
    return written, read


def _memory(name: str) -> float:
    """`VmRSS` or `VmHWM` of this process, in bytes."""
    text = pathlib.Path("/proc/self/status").read_text()
    (line,) = [x for x in text.splitlines() if x.startswith(name)]
    return 1024.0 * int(line.split()[1])


def timed(
    call: Callable[[], object], collectives: Collectives | None
) -> tuple[float, float]:
    """Seconds of a call on all ranks, and the most memory of one of them."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _memory("VmRSS")
    if collectives is not None:
        collectives.barrier("benchmark/start")
    start = time.monotonic()
    call()
    if collectives is not None:
        collectives.barrier("benchmark/end")
    seconds = time.monotonic() - start
    more = np.array([_memory("VmHWM") - before])
    if collectives is not None:
        more = collectives.all_gather(more, "benchmark/memory").numpy()
    return seconds, float(np.max(more))


def make_layer(strategy: Any, rows: int, sharding: str) -> tuple[Any, Any]:
    """A partitioned table with slots, and a checkpoint of both."""
    with strategy.scope():
        layer = tfdist_ext.layers.FullSparse(DIM, rows, sharding=sharding)
        model = keras.Sequential([keras.Input([4], dtype="int64"), layer])
        model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
    model.fit(np.zeros([8, 4], np.int64), np.zeros([8, DIM]), verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    return layer, checkpoint


def show(
    name: str, size: int, seconds: list[float], of_dd: list[float], more: float
) -> None:
    """Prints a line of the table."""
    ours, disk = (
        size / MEGABYTE / statistics.median(each) for each in (seconds, of_dd)
    )
    cells = f"{ours:>8.0f}{disk:>8.0f}{ours / disk:>8.2f}"
    print(f"{name:<8}{cells}{more / MEGABYTE:>10.0f}", flush=True)


def main() -> None:
    arguments = make_parser().parse_args()
    strategy = tfdist_ext.HybridParallelStrategy()
    collectives = strategy.collectives
    keras.utils.set_random_seed(1)
    layer, checkpoint = make_layer(strategy, arguments.rows, arguments.sharding)
    rows = layer.kernel.numpy().copy()
    written, read, disk_written, disk_read = [], [], [], []
    cold, size = False, 0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as own:
        folder = text_of_first_rank(own, collectives, "folder")
        for turn in range(TURNS):
            path = f"{folder}/{turn}/ckpt"
            write = functools.partial(checkpoint.write, path)
            written.append(timed(write, collectives))
            files = list(pathlib.Path(path).parent.iterdir())
            size = sum(file.stat().st_size for file in files)
            if strategy.rank == 0:
                of_write, of_read = of_dd(folder, size, arguments.warm)
                disk_written.append(of_write)
                disk_read.append(of_read)
                cold = drop_page_cache(arguments.warm)
            layer.kernel.assign(np.zeros_like(rows))
            restore = functools.partial(checkpoint.read, path)
            read.append(timed(restore, collectives))
            np.testing.assert_array_equal(layer.kernel.numpy(), rows)
    if strategy.rank == 0:
        print(
            f"{size / MEGABYTE:.0f} MB on {strategy.world_size} ranks, by "
            f"{arguments.sharding}, {'cold' if cold else 'warm'} reads"
        )
        print(f"{'':<8}{'MB/s':>8}{'dd':>8}{'share':>8}{'MB more':>10}")
        for name, times, disk in (
            ("write", written, disk_written),
            ("read", read, disk_read),
        ):
            seconds, more = zip(*times, strict=True)
            show(name, size, list(seconds), disk, max(more))
    if collectives is not None:
        collectives.barrier("benchmark/done")


if __name__ == "__main__":
    main()
