# SPDX-License-Identifier: Apache-2.0
"""The cost model against counted ids, measured bytes and itself."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks import workloads
from tests.tables import planned
from tfdist_ext.tables import cost
from tfdist_ext.tables import load as load_lib
from tfdist_ext.tables import placement as rows_lib
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan import plan
from tfdist_ext.tables.problem import Popularity
from tfdist_ext.tables.problem import exponents_for
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

TIMELINES = (2**17, 58, 100)


def load(size, world_size, shape, **arguments):
    """Load of one table alone, in (row parts, column parts, deduplicate)."""
    problem = planned.make_plan([size], world_size, **arguments).problem
    row_parts, column_parts, deduplicate = shape
    ranks = tuple(range(row_parts * column_parts))
    placement = TablePlacement()
    if ranks:
        placement = TablePlacement(row_parts, column_parts, ranks, deduplicate)
    costs = cost.compute(problem, cost.make_shapes([shape])).pick(0, 0)
    return load_lib.load_of_placement(
        costs, size[1], placement, problem.setting
    )


def drawn(rows, *shape):
    return workloads.scattered_zipf(np.random.default_rng(0), shape, rows)


def array(*values):
    return np.array(values, np.float64)


@pytest.mark.parametrize("rows", [1, 3, 100, 5683, 2**17, 10_131_227])
@pytest.mark.parametrize("draws", [1, 100, 2048, 25_600])
def test_unique_rows_are_as_many_as_counted(rows, draws):
    counted = np.mean(
        [len(np.unique(ids)) for ids in drawn(rows, 20, draws)], dtype=float
    )
    expected = Popularity(array(rows), array(1.1)).unique(array(draws))
    assert expected == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("shape", [(1, 1, False), (4, 1, True), (0, 0, False)])
def test_every_id_of_a_sequence_costs_what_a_sample_of_it_does(shape):
    rows, width, length = TIMELINES
    table = TableConfig("t", rows, width, combiner=None)
    many = FeatureConfig("f", table, (None, length), (None, length, width))
    one = FeatureConfig("f", table, (None,), (None, width))
    shapes = cost.make_shapes([shape])
    found = [
        cost.compute(plan([table], [feature], 4, batch_size=b).problem, shapes)
        for feature, b in ((many, 8), (one, 8 * length))
    ]
    for field in dataclasses.fields(found[0]):
        pair = [getattr(costs, field.name) for costs in found]
        np.testing.assert_allclose(*pair, rtol=1e-12, err_msg=field.name)


def test_repeated_rows_are_as_many_as_counted():
    counted = np.mean(
        [
            (np.unique(ids, return_counts=True)[1] > 1).sum()
            for ids in drawn(2**17, 300, 100)
        ]
    )
    expected = Popularity(array(2**17), array(1.1)).repeated(array(100))
    assert expected == pytest.approx(counted, rel=0.1)


def test_uniform_ids_follow_the_closed_form():
    rows, draws = 1000, 700
    exact = rows * (1 - (1 - 1 / rows) ** draws)
    expected = Popularity(array(rows), array(0.0)).unique(array(draws))
    assert expected == pytest.approx(exact, rel=1e-6)


def test_more_skew_means_fewer_rows():
    exponents = np.linspace(0, 3, 31)
    popularity = Popularity(np.full(31, 1e5), exponents)
    unique = popularity.unique(np.full(31, 1e4))
    assert (np.diff(unique) <= 1e-6).all()


def test_the_exponent_is_found_from_unique_rows():
    unique = Popularity(array(1e5), array(1.3)).unique(array(5000))
    found = exponents_for(array(1e5), array(5000), unique)
    assert found == pytest.approx(1.3, abs=0.01)


@pytest.mark.parametrize("row_parts", [2, 4])
def test_served_samples_are_as_many_as_counted(row_parts):
    ids = drawn(2**17, 256, 5)
    owners = rows_lib.part_of(ids, row_parts)
    served = sum(len(np.unique(sample)) for sample in owners)
    table = (2**17, 8, 5)
    shape = cost.make_shapes([(row_parts, 1, False)])
    problem = planned.make_plan([table], row_parts).problem
    results = cost.compute(problem, shape).pick(0, 0).part_results / 4
    assert row_parts * results == pytest.approx(served, rel=0.05)


def test_an_id_of_timelines_takes_1_3_bytes():
    # As measured, see docs/data_path.md.
    ids = load(TIMELINES, 4, (1, 4, False)).ids.max()
    assert ids / (3 * 256 * 100) == pytest.approx(1.30, abs=0.03)


@pytest.mark.parametrize(
    ("shape", "megabytes"), [((4, 1, False), 1.30), ((1, 4, False), 0.72)]
)
def test_bytes_of_timelines_are_as_measured(shape, megabytes):
    # Besides three tables, the measured figures hold the tower's gradients.
    dense = 2 * 4 * (3 * 58 * 128 + 128 + 129) * 3 / 4
    sent = 3 * load(TIMELINES, 4, shape).sent.max() + dense
    assert sent / 1e6 == pytest.approx(megabytes, rel=0.05)


@pytest.mark.parametrize("world_size", [1, 2, 4, 6])
@pytest.mark.parametrize("deduplicate", [False, True])
def test_what_is_sent_is_received(world_size, deduplicate):
    for parts in [(1, 1), (world_size, 1), (1, world_size)]:
        total = load((5000, 64, 7), world_size, (*parts, deduplicate))
        assert total.sent.sum() == pytest.approx(total.received.sum())
        assert (total.sent >= -1e-9).all() and (total.ids >= -1e-9).all()


def test_one_rank_sends_nothing():
    for shape in [(1, 1, False), (1, 1, True), (0, 0, False)]:
        assert load(TIMELINES, 1, shape).sent == pytest.approx(0)


@pytest.mark.parametrize(
    "shape", [(4, 1, False), (1, 4, True), (2, 2, False), (1, 1, True)]
)
@pytest.mark.parametrize(
    ("argument", "values"),
    [("batch_size", (128, 256, 512)), ("wire_bytes", (1, 2, 4))],
)
def test_more_work_costs_more(shape, argument, values):
    totals = [load(TIMELINES, 4, shape, **{argument: v}) for v in values]
    for less, more in itertools.pairwise(totals):
        assert (less.sent < more.sent).all()
        assert (less.received < more.received).all()
        assert (less.seconds <= more.seconds).all()


def test_more_columns_and_ids_cost_more():
    for shape in [(4, 1, False), (1, 4, False), (4, 1, True), (0, 0, False)]:
        base = load((10_000, 16, 10), 4, shape)
        for size in [(10_000, 32, 10), (10_000, 16, 20), (20_000, 16, 10)]:
            assert (load(size, 4, shape).sent >= base.sent).all(), shape


def test_memory_is_weights_and_slots():
    rows, dim = 1000, 16
    sgd = load((rows, dim, 1), 4, (1, 1, False), slots_per_weight="sgd")
    assert sgd.memory.tolist() == [rows * dim * 4, 0, 0, 0]
    adam = load((rows, dim, 1), 4, (4, 1, False), slots_per_weight="adam")
    assert adam.memory.tolist() == [250 * dim * 12] * 4
    rowwise = load(
        (rows, dim, 1), 4, (2, 2, False), slots_per_weight="RowWiseAdagrad"
    )
    assert rowwise.memory.tolist() == [500 * (8 * 4 + 4)] * 4


def test_bfloat16_counts():
    memory = {}
    for dtype in ("float32", "bfloat16"):
        tables, features = planned.configs([TIMELINES], dtype=dtype)
        plan = planned.plan_lib.plan(
            tables, features, 4, forced={"t0": "row_wise"}
        )
        memory[dtype] = plan.memory
    # One slot in float32 per weight.
    assert memory["bfloat16"] == pytest.approx(0.75 * memory["float32"])
