# SPDX-License-Identifier: Apache-2.0
"""Pooled lookup and its gradient against stock TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops import embedding_ops
from tfdist_ext.ops import reference
from tfdist_ext.sharding.config import ShardSpec

# Around the widths of the vectors of the kernel, and of the workloads.
WIDTHS = [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 58, 64, 114, 127, 128, 129, 300]
ROWS = 50
SPEC = ShardSpec(
    table="emb", rows=200, dim=6, placement="row", rank=1, world_size=4
)


def batch_of(samples, most, weighted, seed=0):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, most + 1, samples)
    row_splits = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows = rng.integers(0, ROWS, row_splits[-1])
    weights = rng.normal(size=len(rows) * weighted).astype(np.float32)
    return tuple(tf.constant(x) for x in (row_splits, rows, weights))


def table_of(width, seed=1):
    rng = np.random.default_rng(seed)
    return tf.Variable(rng.normal(size=(ROWS, width)), dtype=tf.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_lookup_same_as_twin(width, weighted):
    table = table_of(width)
    for samples, most in [(0, 0), (3, 0), (1, 1), (40, 30)]:
        ids = batch_of(samples, most, weighted)
        ours = embedding_ops.lookup(table, *ids)
        assert ours.shape == (samples, width)
        np.testing.assert_allclose(
            ours, reference.lookup(table, *ids), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("width", [1, 5, 16, 58, 129])
def test_gradient_same_as_twin(width, weighted):
    for samples, most in [(0, 0), (3, 0), (1, 1), (40, 30), (3000, 30)]:
        ids = batch_of(samples, most, weighted)
        upstream = tf.random.stateless_normal([samples, width], [1, 2])
        ours = embedding_ops.lookup_grad(*ids, upstream)
        twin = reference.lookup_grad(*ids, upstream)
        np.testing.assert_array_equal(ours[0], twin[0])
        np.testing.assert_allclose(ours[1], twin[1], rtol=1e-4, atol=1e-4)


def test_gradient_of_far_rows():
    rows = np.array([2**40, 3, 2**40, 0], np.int64)
    none = np.zeros(0, np.float32)
    upstream = tf.constant([[1.0], [2.0]])
    unique, grads = embedding_ops.lookup_grad([0, 2, 4], rows, none, upstream)
    np.testing.assert_array_equal(unique, [0, 3, 2**40])
    np.testing.assert_array_equal(grads, [[2.0], [1.0], [3.0]])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("marked", [False, True])
def test_gradient_through_the_tape(marked, calls, graph):
    table = table_of(6)
    if marked:
        table._tfdist_shard = SPEC
    batches = [batch_of(9, 5, True, seed) for seed in range(calls)]
    marks = []

    def gradient(module):
        with tf.GradientTape() as tape:
            outputs = [module.lookup(table, *ids) for ids in batches]
            loss = tf.add_n([tf.reduce_sum(x**2) for x in outputs])
        result = tape.gradient(loss, table)
        marks.append(getattr(result.dense_shape, "_tfdist_shard", None))
        return result

    wrapped = tf.function(gradient) if graph else gradient
    ours = wrapped(embedding_ops)
    assert marks == [SPEC if marked else None]
    np.testing.assert_array_equal(ours.dense_shape, [ROWS, 6])
    if calls == 1:
        assert (np.diff(ours.indices) > 0).all()
    np.testing.assert_allclose(
        tf.convert_to_tensor(ours),
        tf.convert_to_tensor(gradient(reference)),
        rtol=1e-5,
        atol=1e-5,
    )


def test_variable_is_watched_and_reported():
    table = table_of(4)
    with tf.GradientTape() as tape:
        embedding_ops.lookup(table, *batch_of(3, 3, False))
    assert [v is table for v in tape.watched_variables()] == [True]
    frozen = tf.Variable(table, trainable=False)
    with tf.GradientTape() as tape:
        embedding_ops.lookup(frozen, *batch_of(3, 3, False))
    assert tape.watched_variables() == ()


def test_gradient_of_the_weights_is_none():
    row_splits, rows, weights = batch_of(9, 5, True)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        output = embedding_ops.lookup(table_of(4), row_splits, rows, weights)
    assert tape.gradient(output, weights) is None


def test_table_is_not_read_whole():
    table = table_of(6)

    @tf.function
    def step(row_splits, rows, weights):
        with tf.GradientTape() as tape:
            output = embedding_ops.lookup(table, row_splits, rows, weights)
            loss = tf.reduce_sum(output)
        slices = tape.gradient(loss, table)
        return output, slices.values, slices.indices

    graph = step.get_concrete_function(*batch_of(9, 5, False)).graph
    types = {op.type for op in graph.get_operations()}
    assert "Tfdist>Lookup" in types
    assert "ReadVariableOp" not in types


def test_shapes_are_known_in_a_graph():
    table = table_of(6)
    vector = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[vector, vector])
    def run(row_splits, rows):
        output = embedding_ops.lookup(table, row_splits, rows, tf.zeros([0]))
        assert output.shape.as_list() == [None, 6]
        return output

    assert run([0, 1, 1], [4]).shape == (2, 6)


@pytest.mark.parametrize("row", [-1, ROWS, 2**62])
def test_rows_outside_of_the_table_are_refused(row):
    none = np.zeros(0, np.float32)
    rows = np.array([1, row], np.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"{row} is out"):
        embedding_ops.lookup(table_of(4), [0, 2], rows, none)


@pytest.mark.parametrize(
    "row_splits,weights,grad_rows",
    [([0, 3], 0, 1), ([0, 2], 1, 1), ([0, 2], 0, 2)],
)
def test_malformed_inputs_are_refused(row_splits, weights, grad_rows):
    inputs = (
        np.array(row_splits, np.int64),
        np.array([1, 2], np.int64),
        np.ones(weights, np.float32),
    )
    grad = np.ones([grad_rows, 4], np.float32)
    with pytest.raises(tf.errors.InvalidArgumentError):
        embedding_ops.lookup_grad(*inputs, grad)
    if grad_rows == 1:
        with pytest.raises(tf.errors.InvalidArgumentError):
            embedding_ops.lookup(table_of(4), *inputs)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("policy", ["error", "ignore"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_merge_same_as_twin(dtype, policy, count, weighted):
    lists = []
    for seed in range(count):
        row_splits, rows, weights = batch_of(
            20, 6, weighted and seed == 0, seed
        )
        lists.append((tf.cast(rows, dtype), row_splits, weights))
    inputs = tuple(zip(*lists, strict=True))
    limit = ROWS if policy == "error" else 30
    options = {"vocabulary_size": limit, "out_of_range": policy, "layer": "emb"}
    ours = embedding_ops.merge_ids(*inputs, **options)
    twin = reference.merge_ids(*inputs, **options)
    for mine, other in zip(ours, twin, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("module", [embedding_ops, reference])
def test_merge_names_the_bad_id(module):
    none = np.zeros(0, np.float32)
    lists = [np.array([1, 2]), np.array([7, -3])]
    splits = [np.array([0, 1, 2])] * 2
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match="Layer 'emb': id 7 in sample 0 of rank 0 is out of range",
    ):
        module.merge_ids(
            lists, splits, [none] * 2, vocabulary_size=5, layer="emb"
        )


@pytest.mark.skipif(
    not hasattr(tf.keras, "Variable"), reason="tf_keras has no own variables"
)
def test_keras_variable():
    values = table_of(4).numpy()
    variable = tf.keras.Variable(values)
    ids = batch_of(9, 5, False)
    with tf.GradientTape() as tape:
        output = embedding_ops.lookup(variable, *ids)
    slices = tape.gradient(output, variable)
    np.testing.assert_allclose(
        output, reference.lookup(tf.Variable(values), *ids), rtol=1e-5
    )
    unique_rows, _ = reference.lookup_grad(*ids, tf.ones_like(output))
    np.testing.assert_array_equal(slices.indices, unique_rows)


def test_mirrored_variable():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        table = tf.Variable(np.ones([5, 3], np.float32))
    ids = (tf.constant([0, 2, 2], tf.int64), tf.constant([4, 4], tf.int64))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            output = embedding_ops.lookup(table, *ids, tf.zeros([0]))
        return output, tape.gradient(output, table).values

    output, gradient = strategy.run(step)
    np.testing.assert_array_equal(output, [[2.0] * 3, [0.0] * 3])
    np.testing.assert_array_equal(gradient, [[2.0] * 3])
    # As Keras does when it calls a layer outside of a replica.
    output = embedding_ops.lookup(table, *ids, tf.zeros([0]))
    np.testing.assert_array_equal(output, [[2.0] * 3, [0.0] * 3])


def test_threads_do_not_change_the_bits():
    # Large enough for several ranges of rows; one hot row in all of them.
    rng = np.random.default_rng(0)
    samples, hotness = 3000, 40
    rows = rng.zipf(1.3, samples * hotness) % 5000
    row_splits = np.arange(samples + 1) * hotness
    grad = rng.normal(size=(samples, 9)).astype(np.float32)
    weights = rng.normal(size=len(rows)).astype(np.float32)
    whole = embedding_ops.lookup_grad(row_splits, rows, weights, grad)
    for first, row in enumerate(whole[0].numpy()):
        if first % 100:
            continue
        chosen = rows == row
        alone = embedding_ops.lookup_grad(
            np.concatenate(
                [[0], np.cumsum(chosen.reshape(samples, -1).sum(1))]
            ),
            rows[chosen],
            weights[chosen],
            grad,
        )
        np.testing.assert_array_equal(alone[1][0], whole[1][first])
