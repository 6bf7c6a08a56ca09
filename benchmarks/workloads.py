# SPDX-License-Identifier: Apache-2.0
"""The models that are timed and the ids they see.

A workload is a set of sparse layers (a table of `rows` x `width`, looked up
with `hotness` ids per sample and summed) and a small dense head that makes one
logit of their results.
"""

import dataclasses
from typing import Literal

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


# "tower": results are concatenated and go through dense layers. "dot": every
# table has a tower of its own, the logit is the dot product of two. "linear":
# results are the logit but for a bias.
Head = Literal["tower", "dot", "linear"]


@dataclasses.dataclass(frozen=True)
class Table:
    """One sparse layer: `rows` -> `width`, `hotness` ids per sample.

    Ids follow Zipf's law with `exponent` unless `skew` is given: then the
    popularity of a row falls as a power of its place, and `skew` is 1 for rows
    that are all alike.
    """

    rows: int
    width: int
    hotness: int
    skew: float | None = None
    exponent: float = ZIPF_EXPONENT

    @property
    def weights(self) -> int:
        """Number of weights of the table."""
        return self.rows * self.width


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sparse layers and the hidden widths of the towers behind them."""

    name: str
    tables: tuple[Table, ...]
    hidden: tuple[int, ...] = (128,)
    head: Head = "tower"

    @property
    def weights(self) -> int:
        """Number of weights of all tables."""
        return sum(table.weights for table in self.tables)

    @property
    def pooled_width(self) -> int:
        """Width of the concatenated results of the sparse layers."""
        return sum(table.width for table in self.tables)

    @property
    def layers(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per dense tower the (inputs, outputs) of its layers."""
        if self.head == "linear":
            return ()
        dot = self.head == "dot"
        inputs = [t.width for t in self.tables] if dot else [self.pooled_width]
        rest = self.hidden if dot else (*self.hidden, 1)
        return tuple(
            tuple(zip((width, *rest), rest, strict=False)) for width in inputs
        )


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
        # Users and items; as many distinct rows per batch as in ml-100k.
        Workload(
            "movielens",
            (Table(943, 32, 1, skew=2.0), Table(1682, 32, 1, skew=2.4)),
            hidden=(64, 32),
            head="dot",
        ),
        # Logistic regression.
        Workload("a9a", (Table(123, 1, 14, skew=2.0),), (), head="linear"),
        # Criteo's features hashed into small tables.
        Workload(
            "criteo_sample",
            tuple(Table(min(rows, 1000), 16, 1) for rows in CRITEO_ROWS),
            hidden=(64,),
        ),
        # A few ids per sample.
        Workload("words", (Table(2**20, 16, 5),)),
        # `timelines` and `words` where few rows are most of what is asked for.
        Workload("skewed", (Table(2**17, 58, 100, exponent=1.5),) * 3),
        Workload("skewed_words", (Table(2**20, 16, 5, exponent=1.5),)),
        # One table of 16 GiB: for memory, on four ranks or more.
        Workload("huge", (Table(2**25, 128, 20),)),
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
    generator: np.random.Generator,
    shape: tuple[int, ...],
    rows: int,
    exponent: float = ZIPF_EXPONENT,
) -> np.ndarray:
    """Draws int64 ids in `[0, rows)`: Zipf ranks hashed over the rows."""
    ranks = generator.zipf(exponent, shape).astype(np.uint64)
    return ((ranks * SCATTER) % np.uint64(rows)).astype(np.int64)


def draw_ids(
    generator: np.random.Generator, samples: int, table: Table
) -> np.ndarray:
    """Draws the int64 ids `[samples, hotness]` of one table."""
    shape = (samples, table.hotness)
    if table.skew is None:
        return scattered_zipf(generator, shape, table.rows, table.exponent)
    places = (generator.random(shape) ** table.skew * table.rows).astype(
        np.uint64
    )
    return ((places * SCATTER) % np.uint64(table.rows)).astype(np.int64)


def make_batch(
    workload: Workload, batch_size: int, step: int, rank: int, seed: int = 0
) -> Batch:
    """Returns the batch of `rank` in `step`.

    A pure function of its arguments: every variant, and the reference that
    needs the batches of all ranks, sees the same samples.
    """
    generator = np.random.default_rng((seed, step, rank))
    ids = tuple(
        draw_ids(generator, batch_size, table) for table in workload.tables
    )
    labels = generator.integers(0, 2, (batch_size, 1)).astype(np.float32)
    return Batch(ids, labels)
