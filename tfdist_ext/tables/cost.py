# SPDX-License-Identifier: Apache-2.0
"""Costs of a placement: bytes each way, lookups, memory and time per rank.

There are W ranks with b samples each; a number on the wire has f bytes. A table
of N rows and d columns is divided into R x C cells: a row part has N/R rows,
and a cell has w of the columns. A feature has z ids per sample, z' of them
unique; the b z ids of a rank's batch have u unique rows (`problem.Popularity`).
For a sequence, whose rows are not combined, every id counts as a sample.

Each rank requests S results from a row part, with n ids in I bytes:

    pooled         n = b z'/R   S = b (1 - (1 - 1/R)^z')
                   I = n rice(N S / (R n)) + counts + repeats + header
    deduplicated   n = S = u/R
                   I = n rice(N/u) + header
    rice(gap)      = (log2(gap) + 1.5) / 8 bytes, gap the mean distance of ids

A rank sends ids and gradients to owners, and results as an owner:

    sends          I and S w f to every cell that is not its own
                   (W-1) S w f from every cell of its own
    receives       S w f from every cell that is not its own
                   (W-1) (I + S w f) for every cell of its own

For a data_parallel table, it sends and receives the smaller of the entire
gradient, 8 N d (W-1)/W (float32 in both directions), and the touched rows,
(W-1) u (4 d + 8).

Memory is weights and slots. The time of a rank is

    max(sent, received) / link + reads / reading speed + ids x time per id

A row that is read costs its bytes and one cache line, in the forward pass, in
the backward pass and in the update. Every id is encoded or sorted by its sender
and decoded by its owner. A step takes as long as on its busiest rank. If any
table is partitioned, latency and frames of three exchanges are added.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.problem import Popularity
from tfdist_ext.tables.problem import Problem
from tfdist_ext.tables.problem import Setting

Floats = npt.NDArray[np.float64]

# Sizes in the id code, see docs/data_path.md: unary end of a Rice code, number
# of entries of a sample, occurrences of an entry, header of a section.
_RICE_BITS = 1.5
_COUNT_BYTES = 0.5
_REPEAT_BITS = 2.5
_SECTION_BYTES = 8
_DENSE_BYTES = 4
_ROW_ID_BYTES = 8

# Times of a core: estimates for choosing between placements, not for predicting
# a step.
_SECONDS_PER_ID = 5e-9
_SECONDS_PER_SORTED_ID = 20e-9
_SECONDS_PER_SECTION = 1e-6
_CACHE_LINE = 64


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Ways to place a table, `[K]`; data_parallel has 0 parts.

    Attributes:
        row_parts: R, 0 for data_parallel.
        column_parts: C, 0 for data_parallel.
        deduplicate: whether rows are deduplicated.
    """

    row_parts: Floats
    column_parts: Floats
    deduplicate: npt.NDArray[np.bool_]

    @property
    def cells(self) -> Floats:
        """Number of cells, `[K]`."""
        return self.row_parts * self.column_parts


@dataclasses.dataclass(frozen=True)
class Costs:
    """Costs of each table in each shape; all `[tables, K]`.

    The bytes that a rank sends and receives, its computing time and its memory
    are each the sum of three terms: one for every rank, one per cell that the
    rank has, and one per column of such a cell.

    Attributes:
        ids: bytes of ids that a rank without cells sends.
        results: bytes of gradients and results that it sends, and receives.
        part_ids: bytes of ids from one rank to one cell (I).
        part_results: bytes from one rank to one cell per column (S f).
        seconds: computing time of a rank without cells.
        cell_seconds: computing time per cell.
        column_seconds: computing time per column of a cell.
        lookups: bytes of rows that a rank without cells reads for results.
        column_lookups: bytes of rows read per column of a cell.
        memory: bytes on a rank without cells.
        cell_memory: bytes per cell.
        column_memory: bytes per column of a cell.
    """

    ids: Floats
    results: Floats
    part_ids: Floats
    part_results: Floats
    seconds: Floats
    cell_seconds: Floats
    column_seconds: Floats
    lookups: Floats
    column_lookups: Floats
    memory: Floats
    cell_memory: Floats
    column_memory: Floats

    def pick(self, table: int, shape: int) -> Costs:
        """The costs of one table in one shape, as scalars."""
        fields = dataclasses.fields(self)
        return Costs(*(getattr(self, f.name)[table, shape] for f in fields))


def shape_of(placement: TablePlacement) -> tuple[int, int, bool]:
    """Row parts, column parts, deduplicate; data_parallel is (0, 0, False)."""
    if not placement.ranks:
        return (0, 0, False)
    parts = (placement.row_parts, placement.column_parts)
    return (*parts, placement.deduplicate)


def make_shapes(triples: list[tuple[int, int, bool]]) -> Shapes:
    """Arrays of shapes, from the results of `shape_of`."""
    array = np.array(triples, np.float64).reshape(-1, 3)
    return Shapes(array[:, 0], array[:, 1], array[:, 2] > 0)


def compute(problem: Problem, shapes: Shapes) -> Costs:
    """Costs of every table in every shape (the formulas of the module)."""
    features = _Features(problem)
    sparse, touched = _per_feature(features, problem.setting, shapes)
    index = np.array([f.table for f in problem.features], np.int64)

    def by_table(values: Floats) -> Floats:
        total = np.zeros((len(problem.tables), len(shapes.cells)))
        np.add.at(total, index, values)
        return total

    sums = {name: by_table(values) for name, values in sparse.items()}
    tables = _Tables(problem)
    replicated = shapes.cells == 0
    world_size = problem.setting.world_size
    reduced = np.where(
        replicated,
        np.minimum(
            _dense_bytes(world_size, tables.rows * tables.dim),
            _touched_bytes(world_size, by_table(touched), tables.dim),
        ),
        0.0,
    )
    row_bytes = tables.dim * tables.state_bytes + tables.row_slots
    held = np.where(replicated, tables.rows, 0.0)
    part_rows = np.ceil(tables.rows / np.maximum(shapes.row_parts, 1))
    partitioned = np.where(replicated, 0.0, part_rows)
    return Costs(
        ids=sums["part_ids"] * shapes.cells,
        results=sums["sample_results"] + reduced,
        part_ids=sums["part_ids"],
        part_results=sums["part_results"],
        seconds=sums["seconds"]
        + reduced / problem.setting.read_bytes_per_second,
        cell_seconds=sums["cell_seconds"],
        column_seconds=sums["column_seconds"],
        lookups=sums["lookups"],
        column_lookups=sums["column_lookups"],
        memory=held * row_bytes,
        cell_memory=partitioned * tables.row_slots,
        column_memory=partitioned * tables.state_bytes,
    )


def _dense_bytes(world_size: int, numbers: Floats) -> Floats:
    """Bytes that a rank sends in an all_reduce of float32 numbers."""
    return 2 * _DENSE_BYTES * numbers * (world_size - 1) / world_size


def _touched_bytes(world_size: int, rows: Floats, dim: Floats) -> Floats:
    """Bytes that a rank sends in an all_gather of its touched rows."""
    return (world_size - 1) * rows * (_DENSE_BYTES * dim + _ROW_ID_BYTES)


class _Tables:
    """Numbers of the tables as columns, `[tables, 1]`."""

    def __init__(self, problem: Problem) -> None:
        def column(values: list[float]) -> Floats:
            return np.array(values, np.float64)[:, None]

        tables = problem.tables
        self.rows = column([t.rows for t in tables])
        self.dim = column([t.dim for t in tables])
        self.weight_bytes = column([t.weight_bytes for t in tables])
        self.state_bytes = self.weight_bytes + column(
            [_DENSE_BYTES * t.slots_per_weight for t in tables]
        )
        self.row_slots = column(
            [_DENSE_BYTES * t.slots_per_row for t in tables]
        )


class _Features:
    """Numbers of the features, and derived ones, as columns, `[F, 1]`."""

    def __init__(self, problem: Problem) -> None:
        setting = problem.setting
        tables = _Tables(problem)
        index = np.array([f.table for f in problem.features], np.int64)
        self.rows = tables.rows[index]
        self.dim = tables.dim[index]
        self.weight_bytes = tables.weight_bytes[index]
        self.state_bytes = tables.state_bytes[index]
        hotness = np.array([f.hotness for f in problem.features], np.float64)
        exponents = np.array([f.exponent for f in problem.features], np.float64)
        popularity = Popularity(self.rows[:, 0], exponents)
        lists = np.array([f.lists for f in problem.features], np.float64)
        self.results = (lists * setting.batch_size)[:, None]
        batch = hotness * self.results[:, 0]
        self.draws = batch[:, None]
        # A mean below one id means that a share of the samples has one id.
        some = np.maximum(hotness, 1.0)
        share = (hotness / some)[:, None]
        self.in_sample = share * popularity.unique(some)[:, None]
        self.repeats = share * popularity.repeated(some)[:, None]
        self.in_batch = popularity.unique(batch)[:, None]
        world = popularity.unique(batch * setting.world_size)
        self.in_all_batches = world[:, None]
        self.one_hot = (hotness == 1.0)[:, None]


def _per_feature(
    f: _Features, setting: Setting, shapes: Shapes
) -> tuple[dict[str, Floats], Floats]:
    """Costs that a feature adds to its table, `[F, K]` each.

    Returns:
        The sums of `Costs` by name, and the touched rows of data_parallel
        tables.
    """
    dedup, replicated = shapes.deduplicate, shapes.cells == 0
    parts = np.maximum(shapes.row_parts, 1.0)
    batch = f.results
    per_sample = np.maximum(f.in_sample, 1.0)
    served = 1.0 - (1.0 - 1.0 / parts) ** per_sample
    served = batch * served * np.minimum(f.in_sample, 1.0)
    served = np.where(dedup, f.in_batch / parts, served)
    ids = np.where(dedup, f.in_batch, batch * f.in_sample) / parts
    lists = np.where(dedup, 1.0, served)
    coded = ids * _rice_bytes(f.rows / parts, ids / np.maximum(lists, 1e-9))
    extra = np.where(
        dedup | f.one_hot,
        0.0,
        served * _COUNT_BYTES + _repeat_bytes(f, batch) / parts,
    )
    part_ids = coded + extra + _SECTION_BYTES
    part_results = served * setting.wire_bytes
    seconds = _seconds(
        f, setting, shapes, setting.world_size * ids, served * parts
    )
    sums = {
        "part_ids": np.where(replicated, 0.0, part_ids),
        "part_results": np.where(replicated, 0.0, part_results),
        "sample_results": np.where(
            replicated, 0.0, part_results * parts * f.dim
        ),
        **seconds,
    }
    return sums, np.where(replicated, f.in_batch, 0.0)


def _seconds(
    f: _Features,
    setting: Setting,
    shapes: Shapes,
    hosted: Floats,
    asked: Floats,
) -> dict[str, Floats]:
    """Computing times of a rank: for its samples, per cell and per column."""
    dedup, replicated = shapes.deduplicate, shapes.cells == 0
    read = setting.read_bytes_per_second
    parts = np.maximum(shapes.row_parts, 1.0)
    # Forward and backward pass; then the update reads and writes the rows.
    updated = f.in_all_batches / parts
    per_cell = (2 * hosted + 2 * updated) * _CACHE_LINE / read
    per_cell += hosted * _SECONDS_PER_ID
    per_cell += setting.world_size * _SECONDS_PER_SECTION
    per_column = 2 * hosted * f.weight_bytes + 2 * updated * f.state_bytes
    local = 2 * f.draws * (f.weight_bytes * f.dim + _CACHE_LINE) / read
    pooling = 2 * f.draws * _DENSE_BYTES * f.dim / read
    coding = np.where(
        dedup, f.draws * _SECONDS_PER_SORTED_ID + pooling, 0.0
    ) + np.where(dedup, 0.0, f.draws * _SECONDS_PER_ID)
    combining = 2 * _DENSE_BYTES * asked * f.dim / read
    exchanged = coding + combining + shapes.cells * _SECONDS_PER_SECTION
    return {
        "seconds": np.where(replicated, local, exchanged),
        "cell_seconds": np.where(replicated, 0.0, per_cell),
        "column_seconds": np.where(replicated, 0.0, per_column / read),
        "lookups": np.where(replicated, f.draws * f.dim * f.weight_bytes, 0.0),
        "column_lookups": np.where(replicated, 0.0, hosted * f.weight_bytes),
    }


def _rice_bytes(rows: Floats, ids: Floats) -> Floats:
    """Bytes per id in ascending lists of `ids` ids out of `rows` rows."""
    gap = np.maximum(rows / np.maximum(ids, 1e-9), 1.0)
    return np.asarray((np.log2(gap) + _RICE_BITS) / 8)


def _repeat_bytes(f: _Features, batch: Floats) -> Floats:
    """Bytes for the repeated ids of a batch's samples, with their counts."""
    apart = f.in_sample / np.maximum(f.repeats, 1e-9)
    bits = np.log2(np.maximum(apart, 1.0)) + _RICE_BITS + _REPEAT_BITS
    return np.asarray(batch * f.repeats * bits / 8)
