# SPDX-License-Identifier: Apache-2.0
"""The models that are timed and the ids they see.

A workload is a set of sparse layers (a table of `rows` x `width`, looked up
with `hotness` ids per sample and summed) whose results are concatenated and
fed to a small dense tower with one logit at its end.
"""

import dataclasses

import numpy as np

ZIPF_EXPONENT = 1.1

# Knuth's multiplicative hash. It scatters the popular ids (1, 2, 3, ...) over
# the table: rows stay skewed, while contiguous ranges of rows are even.
SCATTER = np.uint64(2654435761)

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683,
    8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15,
    286181, 105, 142572,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """One sparse layer: `rows` -> `width`, `hotness` ids per sample."""

    rows: int
    width: int
    hotness: int

    @property
    def weights(self) -> int:
        """Number of weights of the table."""
        return self.rows * self.width


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sparse layers and the hidden widths of the dense tower behind them."""

    name: str
    tables: tuple[Table, ...]
    hidden: tuple[int, ...] = (128,)

    @property
    def weights(self) -> int:
        """Number of weights of all tables."""
        return sum(table.weights for table in self.tables)

    @property
    def pooled_width(self) -> int:
        """Width of the concatenated results of the sparse layers."""
        return sum(table.width for table in self.tables)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("timelines", (Table(2**17, 58, 100),) * 3),
        Workload("ads", (Table(2**21, 114, 150),) * 2),
        Workload(
            "criteo",
            tuple(Table(rows, 16, 1) for rows in CRITEO_ROWS),
            hidden=(512, 256),
        ),
        # Small enough to see the whole path work within seconds.
        Workload("smoke", (Table(1000, 6, 5), Table(77, 3, 2)), hidden=(8,)),
    )
}


@dataclasses.dataclass(frozen=True)
class Batch:
    """The samples of one rank in one step.

    Attributes:
        ids: per table an int64 array `[batch_size, hotness]`.
        labels: float32 array `[batch_size, 1]` of zeros and ones.
    """

    ids: tuple[np.ndarray, ...]
    labels: np.ndarray


def scattered_zipf(
    generator: np.random.Generator, shape: tuple[int, ...], rows: int
) -> np.ndarray:
    """Draws int64 ids in `[0, rows)`: Zipf ranks hashed over the rows."""
    ranks = generator.zipf(ZIPF_EXPONENT, shape).astype(np.uint64)
    return ((ranks * SCATTER) % np.uint64(rows)).astype(np.int64)


def make_batch(
    workload: Workload, batch_size: int, step: int, rank: int, seed: int = 0
) -> Batch:
    """Returns the batch of `rank` in `step`.

    A pure function of its arguments: every variant, and the reference that
    needs the batches of all ranks, sees the same samples.
    """
    generator = np.random.default_rng((seed, step, rank))
    ids = tuple(
        scattered_zipf(generator, (batch_size, table.hotness), table.rows)
        for table in workload.tables
    )
    labels = generator.integers(0, 2, (batch_size, 1)).astype(np.float32)
    return Batch(ids, labels)
