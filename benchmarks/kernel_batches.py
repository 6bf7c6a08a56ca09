# SPDX-License-Identifier: Apache-2.0
"""What the kernels are timed on: tables, ids, gradients. NumPy only."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import workloads

LEARNING_RATE = 0.05
# Added to the square root by stock and FBGEMM, and below it by ours. So small
# that it makes no difference.
EPSILON = 1e-16
BETAS = (0.9, 0.999)


@dataclasses.dataclass(frozen=True)
class Case:
    """Tables that are looked up and updated together.

    Attributes:
        workload: name in `workloads.WORKLOADS`.
        optimizer: "sgd", "adagrad", "row_wise_adagrad" or "adam".
        batch_size: samples of a step.
        batches: different batches, used in turn.
        dim: width of all tables, of at most 64 MiB each in float32; None for
            the tables of the workload.
        dtype: "float32" or "bfloat16".
    """

    workload: str
    optimizer: str
    batch_size: int = 256
    batches: int = 8
    dim: int | None = None
    dtype: str = "float32"

    @property
    def tables(self) -> tuple[workloads.Table, ...]:
        """The tables of the workload, of another width if asked for."""
        tables = workloads.WORKLOADS[self.workload].tables
        if self.dim is None:
            return tables
        most = 2**24 // self.dim
        return tuple(
            dataclasses.replace(t, width=self.dim, rows=min(t.rows, most))
            for t in tables
        )

    @property
    def one_sample(self) -> Case:
        """The same tables with the smallest batch."""
        return dataclasses.replace(self, batch_size=1)


def padded(width: int) -> int:
    """The next multiple of 4, which FBGEMM needs."""
    return -(-width // 4) * 4


def ids(case: Case, batch: int) -> list[np.ndarray]:
    """Per table int64 `[batch_size, hotness]`."""
    workload = dataclasses.replace(
        workloads.WORKLOADS[case.workload], tables=case.tables
    )
    made = workloads.make_batch(workload, case.batch_size, batch, 0)
    return list(made.ids)


def weights(case: Case, table: int, width: int) -> np.ndarray:
    """Initial values `[rows, width]`: columns of those of the padded width."""
    shape = (case.tables[table].rows, padded(width))
    generator = np.random.default_rng((7, table))
    values = generator.random(shape, np.float32)
    values -= 0.5
    return values[:, :width]


def gradients(case: Case, batch: int, width: int, table: int) -> np.ndarray:
    """Gradient `[batch_size, width]` of the lookups of a table."""
    shape = (case.batch_size, padded(width))
    generator = np.random.default_rng((8, table, batch))
    return generator.normal(size=shape).astype(np.float32)[:, :width]


def forward_bytes(case: Case, padding: bool) -> int:
    """Bytes of the rows that one step's lookups read."""
    return sum(
        case.batch_size
        * table.hotness
        * (padded(table.width) if padding else table.width)
        * (4 if case.dtype == "float32" else 2)
        for table in case.tables
    )


def touched(case: Case, table: int) -> np.ndarray:
    """The distinct rows of the first batch."""
    return np.unique(ids(case, 0)[table])
