# SPDX-License-Identifier: Apache-2.0
"""From the owners' sums to results, against stock TensorFlow.

The world is simulated in one process: every rank looks up its part of the
tables, the test carries the numbers, every rank combines. Rows are spread by
id mod row_parts here: the ops do not know how.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.reference import lookup as reference_lookup
from tfdist_ext.ops import lookup_ops
from tfdist_ext.tables.placement import FeaturePlacement

ROWS = 30


def placement(name, dim, row_parts, column_parts, ranks):
    return FeaturePlacement(name, ROWS, dim, row_parts, column_parts, ranks)


# (table, placement) of every feature; features of one table share it.
WORLDS = {
    1: [(0, placement("a", 5, 1, 1, (0,))), (1, placement("b", 2, 1, 1, (0,)))],
    2: [
        (0, placement("row", 3, 2, 1, (0, 1))),
        (1, placement("column", 7, 1, 2, (1, 0))),
        (0, placement("row_again", 3, 2, 1, (0, 1))),
        (2, placement("table", 4, 1, 1, (1,))),
    ],
    4: [
        (0, placement("grid", 6, 2, 2, (3, 0, 2, 1))),
        (1, placement("table", 58, 1, 1, (2,))),
        (0, placement("grid_again", 6, 2, 2, (3, 0, 2, 1))),
        (2, placement("some", 5, 1, 3, (1, 3, 0))),
        (3, placement("row", 16, 4, 1, (0, 1, 2, 3))),
        (4, placement("pair", 1, 2, 1, (1, 2))),
    ],
}


class World:
    """Batches of all ranks, with what encode and decode would make of them."""

    def __init__(self, world_size, seed=0, most=4, weighted=False, samples=9):
        rng = np.random.default_rng(seed)
        self.size = world_size
        self.features = WORLDS[world_size]
        self.placements = [p for _, p in self.features]
        dims = {t: p.dim for t, p in self.features}
        self.tables = [
            rng.normal(size=(ROWS, dims[t])).astype(np.float32)
            for t in sorted(dims)
        ]
        self.batches = []  # per rank and feature: lists of (id, weight)
        for rank in range(world_size):
            counts = rng.integers(0, samples + 1, len(self.features))
            counts *= rank != 1  # a rank whose batch is over
            self.batches.append(
                [
                    [
                        [
                            (i, rng.normal() if weighted else 1.0)
                            for i in rng.integers(0, ROWS, length)
                        ]
                        for length in rng.integers(0, most + 1, count)
                    ]
                    for count in counts
                ]
            )
        self.weighted = weighted

    def cell(self, rank, f):
        """Row part, first column and the one after the last, or None."""
        p = self.placements[f]
        if rank not in p.ranks:
            return None
        i, j = divmod(p.ranks.index(rank), p.column_parts)
        ends = [part * p.dim // p.column_parts for part in (j, j + 1)]
        return i, *ends

    def hosted(self, rank):
        """Local tables of a rank and the index of every feature's, or -1."""
        tables, names, feature_tables = [], [], []
        for f, (t, p) in enumerate(self.features):
            cell = self.cell(rank, f)
            if cell and t not in names:
                names.append(t)
                i, first, end = cell
                part = self.tables[t][i :: p.row_parts, first:end]
                tables.append(tf.Variable(part))
            feature_tables.append(names.index(t) if cell else -1)
        return tables, names, feature_tables

    def sent(self, source, rank, f):
        """What `source` asks of `rank`: {sample: [(local row, weight)]}."""
        cell, result = self.cell(rank, f), {}
        if cell is None:
            return result
        parts = self.placements[f].row_parts
        for sample, ids in enumerate(self.batches[source][f]):
            mine = [(i // parts, w) for i, w in ids if i % parts == cell[0]]
            if mine:
                result[sample] = mine
        return result

    def lookup_inputs(self, rank):
        served = np.zeros([self.size, len(self.features)], np.int64)
        row_splits, rows, weights = [0], [], []
        for source in range(self.size):
            for f, _ in enumerate(self.features):
                for entries in self.sent(source, rank, f).values():
                    served[source, f] += 1
                    rows += [row for row, _ in entries]
                    weights += [weight for _, weight in entries]
                    row_splits.append(len(rows))
        return (
            np.array(row_splits),
            np.array(rows, np.int64),
            np.array(weights if self.weighted else [], np.float32),
            served,
        )

    def combine_inputs(self, source, scale=1.0):
        sent = [
            [
                list(self.sent(source, rank, f))
                for f in range(len(self.features))
            ]
            for rank in range(self.size)
        ]
        ids = [sample for row in sent for each in row for sample in each]
        return (
            np.array(ids, np.int32),
            np.array([[len(each) for each in row] for row in sent]),
            np.array([len(batch) for batch in self.batches[source]]),
            tf.constant(scale, tf.float32),
        )

    def expected(self, source, f):
        t, p = self.features[f]
        batch = self.batches[source][f]
        result = np.zeros([len(batch), p.dim], np.float32)
        for sample, ids in enumerate(batch):
            for i, weight in ids:
                result[sample] += weight * self.tables[t][i]
        return result

    def options(self):
        return {"placements": self.placements, "world_size": self.size}


def values_of(world):
    """Per rank its lookup's values, cut by the ranks they are for."""
    result = []
    for rank in range(world.size):
        tables, _, feature_tables = world.hosted(rank)
        values, sent = lookup_ops.lookup(
            tables, *world.lookup_inputs(rank), feature_tables=feature_tables
        )
        result.append(tf.split(values, sent, num=world.size))
    return result


def parts_for(world, values, rank):
    return tf.concat([values[source][rank] for source in range(world.size)], 0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("most", [0, 1, 6])
@pytest.mark.parametrize("world_size", WORLDS)
def test_results_are_those_of_whole_tables(world_size, most, weighted):
    world = World(world_size, most=most, weighted=weighted)
    values = values_of(world)
    for rank in range(world_size):
        parts = parts_for(world, values, rank)
        inputs = parts, *world.combine_inputs(rank)
        ours = lookup_ops.join_parts(*inputs, **world.options())
        twin = reference_lookup.join_parts(*inputs, **world.options())
        for f, (mine, other) in enumerate(zip(ours, twin, strict=True)):
            expected = world.expected(rank, f)
            assert mine.shape == expected.shape
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(mine, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_gradients_are_those_of_whole_tables(world_size, weighted):
    world = World(world_size, weighted=weighted)
    scales = [1.0, 0.5, 2.0, 0.25][:world_size]
    rng = np.random.default_rng(3)
    expected = [np.zeros_like(table) for table in world.tables]
    back = []  # per rank: the gradients of what it sent, by owner
    for rank in range(world_size):
        upstream = []
        for f, (t, p) in enumerate(world.features):
            batch = world.batches[rank][f]
            grad = rng.normal(size=[len(batch), p.dim]).astype(np.float32)
            upstream.append(grad)
            for sample, ids in enumerate(batch):
                for i, weight in ids:
                    expected[t][i] += scales[rank] * weight * grad[sample]
        back.append(combine_gradient(world, rank, scales[rank], upstream))
    for rank in range(world_size):
        tables, names, feature_tables = world.hosted(rank)
        unique_rows, row_grads = lookup_ops.lookup_grad(
            *world.lookup_inputs(rank),
            tf.concat([back[source][rank] for source in range(world_size)], 0),
            feature_tables=feature_tables,
            table_shapes=[table.shape for table in tables],
        )
        for local, t in enumerate(names):
            f = feature_tables.index(local)
            i, first, end = world.cell(rank, f)
            part = expected[t][i :: world.placements[f].row_parts, first:end]
            dense = np.zeros_like(part)
            dense[unique_rows[local]] = row_grads[local]
            np.testing.assert_allclose(dense, part, rtol=1e-4, atol=1e-5)


def combine_gradient(world, rank, scale, upstream):
    """The gradient of the parts, alike in both; cut by the owners."""
    inputs = world.combine_inputs(rank, scale)
    sizes = [
        sum(
            int(count) * (world.cell(owner, f)[2] - world.cell(owner, f)[1])
            for f, count in enumerate(counts)
            if count
        )
        for owner, counts in enumerate(inputs[1])
    ]
    parts = tf.ones([sum(sizes)])
    results = []
    for module in (lookup_ops, reference_lookup):
        with tf.GradientTape() as tape:
            tape.watch(parts)
            outputs = module.join_parts(parts, *inputs, **world.options())
        results.append(tape.gradient(outputs, parts, upstream))
    if results[1] is not None and sum(sizes):
        np.testing.assert_allclose(*results, rtol=1e-6)
    return tf.split(results[0], sizes)


def test_scale_zero_stops_nan():
    world = World(2)
    inputs = world.combine_inputs(0, 0.0)
    parts = parts_for(world, values_of(world), 0)
    with tf.GradientTape() as tape:
        tape.watch(parts)
        outputs = lookup_ops.join_parts(parts, *inputs, **world.options())
    upstream = [tf.fill(tf.shape(x), float("nan")) for x in outputs]
    gradient = tape.gradient(outputs, parts, upstream)
    assert len(gradient) > 0
    np.testing.assert_array_equal(gradient, np.zeros(len(gradient)))


def test_one_result_may_be_unused():
    world = World(2, seed=1)
    parts = parts_for(world, values_of(world), 0)

    @tf.function
    def gradient(parts):
        with tf.GradientTape() as tape:
            tape.watch(parts)
            outputs = lookup_ops.join_parts(
                parts, *world.combine_inputs(0), **world.options()
            )
            assert outputs[0].shape.as_list() == [None, 3]
            loss = tf.reduce_sum(outputs[1])
        return tape.gradient(loss, parts)

    assert set(np.unique(gradient(parts))) == {0.0, 1.0}


@pytest.mark.parametrize("samples", [0, 127, 128, 1000])
def test_many_samples_on_many_ranks(samples):
    # More samples than are finished at once, exclusive rows as of
    # deduplicated ids, and rows that all ranks add to.
    world_size, width = 4, 5
    rng = np.random.default_rng(1)
    owner = rng.integers(0, world_size + 1, samples)
    sections = [np.flatnonzero(owner == rank) for rank in range(world_size)]
    sections[2] = np.arange(samples)
    splits = np.array([[len(section)] for section in sections])
    ids = np.concatenate(sections).astype(np.int32)
    parts = rng.normal(size=len(ids) * width).astype(np.float32)
    options = {
        "placements": [placement("f", width, 4, 1, (2, 0, 1, 3))],
        "world_size": world_size,
    }
    inputs = parts, ids, splits, [samples], 1.0
    (ours,) = lookup_ops.join_parts(*inputs, **options)
    (twin,) = reference_lookup.join_parts(*inputs, **options)
    np.testing.assert_allclose(ours, twin, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "parts,ids,splits,samples",
    [
        (4, [0, 1], [[1], [1]], [2]),  # numbers too few
        (6, [0, 2], [[1], [1]], [2]),  # a sample too high
        (6, [0, -1], [[1], [1]], [2]),  # a negative sample
        (6, [1, 1], [[2], [0]], [2]),  # a sample twice
        (6, [1, 0], [[2], [0]], [2]),  # not ascending
        (6, [0, 1], [[1], [0]], [2]),  # sample_ids left over
        (6, [0, 1], [[1], [2]], [2]),  # sample_ids too few
        (6, [0, 1], [[3], [-1]], [2]),  # a negative count
        (6, [0, 1], [[1]], [2]),  # a rank too few
        (6, [0, 1], [[1], [1]], [2, 2]),  # samples of two features
        (6, [0, 1], [[1], [1]], [-2]),  # negative samples
        (6, [0, 1], [[1], [1]], [1 << 62]),  # more than a shape may have
    ],
)
def test_malformed_inputs_are_refused(parts, ids, splits, samples):
    with pytest.raises(tf.errors.InvalidArgumentError):
        lookup_ops.join_parts(
            np.ones(parts, np.float32),
            np.array(ids, np.int32),
            np.array(splits),
            np.array(samples),
            1.0,
            placements=[placement("f", 3, 2, 1, (0, 1))],
            world_size=2,
        )


def test_samples_without_a_cell_are_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match="no cell"):
        lookup_ops.join_parts(
            np.ones(3, np.float32),
            np.array([0], np.int32),
            np.array([[0], [1]]),
            np.array([2]),
            1.0,
            placements=[placement("f", 3, 1, 1, (0,))],
            world_size=2,
        )


def test_a_scale_that_is_no_scalar_is_refused():
    parts = tf.ones([6])
    with tf.GradientTape() as tape:
        tape.watch(parts)
        (joined,) = lookup_ops.join_parts(
            parts,
            np.array([0, 1], np.int32),
            np.array([[1], [1]]),
            np.array([2]),
            [1.0, 2.0],
            placements=[placement("f", 3, 2, 1, (0, 1))],
            world_size=2,
        )
    with pytest.raises(tf.errors.InvalidArgumentError, match="be a scalar"):
        tape.gradient(joined, parts)
