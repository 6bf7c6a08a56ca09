# SPDX-License-Identifier: Apache-2.0
"""Pooled lookup and its gradient against stock TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ops.csr_batches import csr_batch
from tests.reference import lookup as reference_lookup
from tfdist_ext import marks
from tfdist_ext.ops import lookup_ops
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement

# Around the widths of the vectors of the kernel, and of the workloads.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 58, 64, 114, 127, 128, 129, 300]
ROWS = 50
SPEC = ShardSpec.of(
    "emb", 200, 6, TablePlacement.row_wise(4), rank=1, world_size=4
)
NONE = np.zeros(0, np.float32)
# One table, three of them, one that features share, one without samples here.
LAYERS = [([5], [0]), ([58, 3, 16], [0, 1, 2]), ([7, 2, 4], [2, 0, 2, -1])]


def batch_of(samples, most, weighted, seed=0):
    rng = np.random.default_rng(seed)
    rows, row_splits, weights = csr_batch(rng, samples, most, ROWS, weighted)
    return tuple(map(tf.constant, (row_splits, rows, weights)))


def one_feature(samples, *rest, **options):
    """A batch of one feature and one rank, with `served`."""
    return *batch_of(samples, *rest, **options), np.array([[samples]])


def table_of(width, seed=1, dtype=tf.float32, rows=ROWS):
    rng = np.random.default_rng(seed)
    return tf.Variable(rng.normal(size=(rows, width)), dtype=dtype)


def layer_batch(feature_tables, ranks, samples, most, weighted, seed=0):
    """What some ranks ask for; every feature has samples of its own."""
    rng = np.random.default_rng(seed)
    served = rng.integers(0, samples + 1, [ranks, len(feature_tables)])
    served[:, np.array(feature_tables) < 0] = 0
    if ranks > 1:
        served[1] = 0
    return *batch_of(served.sum(), most, weighted, seed), served


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_lookup_same_as_twin(width, weighted, dtype):
    table = table_of(width, dtype=dtype)
    for samples, most in [(0, 0), (3, 0), (1, 1), (40, 30)]:
        inputs = one_feature(samples, most, weighted)
        ours, sent = lookup_ops.lookup([table], *inputs, feature_tables=[0])
        twin = reference_lookup.lookup([table], *inputs, feature_tables=[0])
        assert ours.shape == (samples * width,)
        np.testing.assert_array_equal(sent, [samples * width])
        np.testing.assert_allclose(ours, twin[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("width", WIDTHS)
def test_one_row_per_sample_is_copied(width, dtype):
    table = table_of(width, dtype=dtype)
    rows = np.random.default_rng(0).integers(0, ROWS, 70)
    # The last sample has two rows in the second case.
    for row_splits in (np.arange(71), np.append(np.arange(69), 70)):
        served = [[len(row_splits) - 1]]
        values, _ = lookup_ops.lookup(
            [table], row_splits, rows, NONE, served, feature_tables=[0]
        )
        expected = tf.gather(tf.cast(table, tf.float32), rows).numpy()
        if len(row_splits) == 70:
            expected[68] += expected[69]
            expected = expected[:69]
        np.testing.assert_allclose(values, expected.ravel(), rtol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("widths,feature_tables", LAYERS)
def test_layer_same_as_twin(widths, feature_tables, ranks, weighted):
    dtypes = [tf.float32, tf.bfloat16, tf.float32]
    tables = [
        table_of(width, seed=i, dtype=dtypes[i])
        for i, width in enumerate(widths)
    ]
    for samples, most in [(0, 0), (9, 0), (1, 1), (17, 12)]:
        inputs = layer_batch(feature_tables, ranks, samples, most, weighted)
        options = {"feature_tables": feature_tables}
        ours = lookup_ops.lookup(tables, *inputs, **options)
        twin = reference_lookup.lookup(tables, *inputs, **options)
        np.testing.assert_allclose(ours[0], twin[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(ours[1], twin[1])
        options["table_shapes"] = [table.shape for table in tables]
        upstream = tf.random.stateless_normal(ours[0].shape, [1, 2])
        ours = lookup_ops.lookup_grad(*inputs, upstream, **options)
        twin = reference_lookup.lookup_grad(*inputs, upstream, **options)
        for mine, other in zip(ours[0], twin[0], strict=True):
            np.testing.assert_array_equal(mine, other)
        for mine, other in zip(ours[1], twin[1], strict=True):
            assert mine.shape == other.shape
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 5, 16, 58, 129])
def test_gradient_same_as_twin(width, weighted):
    options = {"feature_tables": [0], "table_shapes": [(2**40, width)]}
    for samples, most in [(1, 1), (40, 30), (3000, 30)]:
        inputs = one_feature(samples, most, weighted)
        upstream = tf.random.stateless_normal([samples * width], [1, 2])
        ours = lookup_ops.lookup_grad(*inputs, upstream, **options)
        twin = reference_lookup.lookup_grad(*inputs, upstream, **options)
        np.testing.assert_array_equal(ours[0][0], twin[0][0])
        np.testing.assert_allclose(ours[1][0], twin[1][0], rtol=1e-4, atol=1e-4)


def test_gradient_of_far_rows():
    rows = np.array([2**40, 3, 2**40, 0], np.int64)
    (unique,), (grads,) = lookup_ops.lookup_grad(
        *([0, 2, 4], rows, NONE, [[2]], [1.0, 2.0]),
        feature_tables=[0],
        table_shapes=[(2**40 + 1, 1)],
    )
    np.testing.assert_array_equal(unique, [0, 3, 2**40])
    np.testing.assert_array_equal(grads, [[2.0], [1.0], [3.0]])


@pytest.mark.parametrize("row,rows", [(2**62, 2**63 - 1), (5, 5), (-1, 5)])
def test_gradient_of_rows_outside_of_the_table(row, rows):
    inputs = ([0, 2, 4], [row, 3, row, 0], NONE, [[2]], [1.0, 2.0])
    options = {"feature_tables": [0], "table_shapes": [(rows, 1)]}
    why = f"rows must be in|Row {row} is out of range: table 0 has 5 rows"
    with pytest.raises(tf.errors.InvalidArgumentError, match=why):
        lookup_ops.lookup_grad(*inputs, **options)


def test_gradient_of_ascending_rows():
    # What deduplicated rows of several ranks look like: nothing to sort, or
    # ascending pieces.
    options = {"feature_tables": [0], "table_shapes": [(40, 3)]}
    for rows in (np.arange(0, 40, 2), np.tile(np.arange(10), 2)):
        grad = np.arange(60, dtype=np.float32)
        inputs = np.arange(21), rows, NONE, [[10], [10]], grad
        ours = lookup_ops.lookup_grad(*inputs, **options)
        twin = reference_lookup.lookup_grad(*inputs, **options)
        np.testing.assert_array_equal(ours[0][0], twin[0][0])
        np.testing.assert_allclose(ours[1][0], twin[1][0])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
def test_gradient_through_the_tape(dtype, marked, calls, graph):
    tables = [table_of(6, dtype=dtype), table_of(2)]
    if marked:
        marks.set_shard_spec(tables[0], SPEC)
    batches = [
        layer_batch([0, 1, 0], 2, 9, 5, True, seed) for seed in range(calls)
    ]
    specs = []

    def gradient(module):
        with tf.GradientTape() as tape:
            outputs = [
                module.lookup(tables, *batch, feature_tables=[0, 1, 0])[0]
                for batch in batches
            ]
            loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs])
        results = tape.gradient(loss, tables)
        specs.append([marks.gradient_spec(each) for each in results])
        return results

    wrapped = tf.function(gradient) if graph else gradient
    ours = wrapped(lookup_ops)
    assert specs == [[SPEC if marked else None, None]]
    twins = gradient(reference_lookup)
    for i, (mine, twin) in enumerate(zip(ours, twins, strict=True)):
        np.testing.assert_array_equal(mine.dense_shape, tables[i].shape)
        if calls == 1:
            assert (np.diff(mine.indices) > 0).all()
        assert mine.dtype == tf.float32
        # The stock gradient of a bfloat16 table is rounded.
        close = 2e-2 if tables[i].dtype == tf.bfloat16 else 1e-5
        np.testing.assert_allclose(
            tf.convert_to_tensor(mine),
            tf.cast(tf.convert_to_tensor(twin), tf.float32),
            rtol=close,
            atol=close,
        )


def test_empty_tables():
    tables = [table_of(3, rows=0), table_of(0), table_of(4)]
    options = {"feature_tables": [0, 1, 2]}
    served = np.array([[2, 0, 1], [0, 1, 1]])
    inputs = [0, 0, 0, 1, 1, 2], [4, 5], NONE, served
    with tf.GradientTape() as tape:
        values, sent = lookup_ops.lookup(tables, *inputs, **options)
    np.testing.assert_array_equal(sent, [10, 4])
    row = tables[2][4].numpy()
    np.testing.assert_array_equal(
        values, [0.0] * 6 + [*row] + [*tables[2][5].numpy()]
    )
    slices = tape.gradient(values, tables)
    assert [s.indices.shape[0] for s in slices] == [0, 0, 2]
    assert [s.values.shape[1] for s in slices] == [3, 0, 4]
    with pytest.raises(tf.errors.InvalidArgumentError, match="has 0 rows"):
        lookup_ops.lookup(
            tables, [0, 1], [0], NONE, [[1, 0, 0]], feature_tables=[0, 1, 2]
        )


def test_no_tables():
    options = {"feature_tables": [-1, -1]}
    inputs = np.zeros(1, np.int64), np.zeros(0, np.int64), NONE, [[0, 0]] * 2
    values, sent = lookup_ops.lookup([], *inputs, **options)
    assert values.shape == (0,)
    np.testing.assert_array_equal(sent, [0, 0])
    options["table_shapes"] = []
    assert lookup_ops.lookup_grad(*inputs, NONE, **options) == ([], [])


def test_a_table_may_come_twice():
    table = table_of(4)
    values, _ = lookup_ops.lookup(
        [table, table], [0, 1, 2], [7, 7], NONE, [[1, 1]], feature_tables=[0, 1]
    )
    np.testing.assert_array_equal(values[:4], values[4:])


def test_variable_is_watched_and_reported():
    tables = [table_of(4), tf.Variable(table_of(4), trainable=False)]
    with tf.GradientTape() as tape:
        lookup_ops.lookup(
            tables, *layer_batch([0, 1], 2, 3, 3, True), feature_tables=[0, 1]
        )
    assert [v is tables[0] for v in tape.watched_variables()] == [True]


def test_gradient_of_the_weights_is_none():
    row_splits, rows, weights, served = one_feature(9, 5, True)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        values, _ = lookup_ops.lookup(
            [table_of(4)], row_splits, rows, weights, served, feature_tables=[0]
        )
    assert tape.gradient(values, weights) is None


def test_tables_are_not_read_whole():
    tables = [table_of(6), table_of(3)]

    @tf.function
    def step(*inputs):
        with tf.GradientTape() as tape:
            values, _ = lookup_ops.lookup(
                tables, *inputs, feature_tables=[0, 1]
            )
            loss = tf.reduce_sum(values)
        slices = tape.gradient(loss, tables)
        assert slices[0].values.shape.as_list() == [None, 6]
        return values, slices[0].values, slices[0].indices

    inputs = layer_batch([0, 1], 2, 9, 5, False)
    graph = step.get_concrete_function(*inputs).graph
    types = {op.type for op in graph.get_operations()}
    assert "Tfdist>Lookup" in types
    assert "ReadVariableOp" not in types


@pytest.mark.parametrize("row", [-1, ROWS, 2**62])
def test_rows_outside_of_the_table_are_refused(row):
    rows = np.array([1, row, 1], np.int64)
    tables = [table_of(4), table_of(4, rows=200)]
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"{row} is out of range: table 0"
    ):
        lookup_ops.lookup(
            tables, [0, 2, 3], rows, NONE, [[1, 1]], feature_tables=[0, 1]
        )


@pytest.mark.parametrize(
    "row_splits,weights,served,tables,grads",
    [
        ([0, 3], 0, [[1]], [0], 4),  # more entries than rows
        ([0, 2], 1, [[1]], [0], 4),  # a weight too few
        ([0, 2], 0, [[1]], [0], 8),  # a gradient too many
        ([0, 2], 0, [[2]], [0], 8),  # more samples than row_splits
        ([0, 1, 2], 0, [[1]], [0], 4),  # fewer samples
        ([0, 1, 2], 0, [[3, -1]], [0, 0], 8),  # a negative count
        ([0, 2], 0, [[1]], [-1], 4),  # a feature that has no table
        ([0, 2], 0, [[1]], [0, 0], 4),  # a column of served too few
        ([0, 2], 0, [1], [0], 4),  # served is no matrix
        ([0, 2], 0, [[1]], [1], 4),  # no such table
    ],
)
def test_malformed_inputs_are_refused(
    row_splits, weights, served, tables, grads
):
    inputs = (
        np.array(row_splits, np.int64),
        np.array([1, 2], np.int64),
        np.ones(weights, np.float32),
        np.array(served, np.int64),
    )
    options = {"feature_tables": tables}
    with pytest.raises(tf.errors.InvalidArgumentError):
        grad = np.ones(grads, np.float32)
        shapes = {"table_shapes": [(50, 4)]}
        lookup_ops.lookup_grad(*inputs, grad, **shapes, **options)
    if grads == 4 or served != [[1]]:
        with pytest.raises(tf.errors.InvalidArgumentError):
            lookup_ops.lookup([table_of(4)], *inputs, **options)


@pytest.mark.parametrize("dtype", [tf.float64, tf.int32])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(tf.errors.InvalidArgumentError, match="bfloat16"):
        lookup_ops.lookup(
            [table_of(4, dtype=dtype)],
            *one_feature(2, 1, False),
            feature_tables=[0],
        )


@pytest.mark.skipif(
    not hasattr(tf.keras, "Variable"), reason="tf_keras has no own variables"
)
def test_keras_variable():
    values = table_of(4).numpy()
    variable = tf.keras.Variable(values)
    inputs = one_feature(9, 5, False)
    with tf.GradientTape() as tape:
        output, _ = lookup_ops.lookup([variable], *inputs, feature_tables=[0])
    slices = tape.gradient(output, variable)
    twin = reference_lookup.lookup([variable], *inputs, feature_tables=[0])
    np.testing.assert_allclose(output, twin[0], rtol=1e-5)
    np.testing.assert_array_equal(slices.indices, np.unique(inputs[1]))


def test_mirrored_variable():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        table = tf.Variable(np.ones([5, 3], np.float32))
    inputs = tf.constant([0, 2, 2], tf.int64), tf.constant([4, 4], tf.int64)
    rest = NONE, [[2]]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            output, _ = lookup_ops.lookup(
                [table], *inputs, *rest, feature_tables=[0]
            )
        return output, tape.gradient(output, table).values

    output, gradient = strategy.run(step)
    np.testing.assert_array_equal(output, [2.0] * 3 + [0.0] * 3)
    np.testing.assert_array_equal(gradient, [[2.0] * 3])
    # As Keras does when it calls a layer outside of a replica.
    output, _ = lookup_ops.lookup([table], *inputs, *rest, feature_tables=[0])
    np.testing.assert_array_equal(output, [2.0] * 3 + [0.0] * 3)


def test_threads_do_not_change_the_bits():
    # Large enough for several ranges of rows; one hot row in all of them.
    rng = np.random.default_rng(0)
    samples, hotness = 3000, 40
    rows = rng.zipf(1.3, samples * hotness) % 5000
    row_splits = np.arange(samples + 1) * hotness
    grad = rng.normal(size=samples * 9).astype(np.float32)
    weights = rng.normal(size=len(rows)).astype(np.float32)
    options = {"feature_tables": [0], "table_shapes": [(5000, 9)]}
    served = [[1000], [2000]]
    (unique,), (whole,) = lookup_ops.lookup_grad(
        row_splits, rows, weights, served, grad, **options
    )
    for first, row in enumerate(unique.numpy()):
        if first % 100:
            continue
        chosen = rows == row
        splits = np.cumsum(chosen.reshape(samples, -1).sum(1))
        _, (alone,) = lookup_ops.lookup_grad(
            np.concatenate([[0], splits]),
            rows[chosen],
            weights[chosen],
            served,
            grad,
            **options,
        )
        np.testing.assert_array_equal(alone[0], whole[first])
