# SPDX-License-Identifier: Apache-2.0
"""How tensors of a step depend on its batch, by the ops that make them."""

import types

import pytest
import tensorflow as tf

from tfdist_ext.numbers import kinds
from tfdist_ext.numbers.dependence import BatchDependence
from tfdist_ext.numbers.kinds import MEAN
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import SUM
from tfdist_ext.ops import collective_ops

W = [[1.0, 2.0], [0.5, -1.0], [0.1, 0.3]]  # [3, 2]
LABELS = [0, 1, 1, 0, 2, 1, 0, 2]


def samples(x):
    return tf.cast(tf.shape(x)[0], tf.float32)


def mask(x):
    return tf.cast(x > 0.3, tf.float32)


def rows_of(x):
    return tf.range(tf.shape(x)[0])


# What a formula of `[n, 3]` is: the parts of a linear combination.
LINEAR = {
    "mean": (lambda x: tf.reduce_mean(tf.abs(x)), {MEAN}),
    "sum": (lambda x: tf.reduce_sum(x * x), {SUM}),
    "half the squares": (tf.nn.l2_loss, {SUM}),
    "mean of sums": (lambda x: tf.reduce_mean(tf.reduce_sum(x, 1)), {MEAN}),
    "sum of means": (lambda x: tf.reduce_sum(tf.reduce_mean(x, 1)), {SUM}),
    "features of a mean": (
        lambda x: tf.reduce_sum(tf.reduce_mean(x, 0)),
        {MEAN},
    ),
    "sum by samples": (lambda x: tf.reduce_sum(x) / samples(x), {MEAN}),
    "sum by elements": (
        lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
        {MEAN},
    ),
    "sum by at least 1": (
        lambda x: tf.reduce_sum(x) / tf.maximum(samples(x), 1.0),
        {MEAN},
    ),
    "sum and constant": (lambda x: tf.reduce_sum(x) + 0.5, {SUM, SAME}),
    "mean and constant": (lambda x: 0.5 - tf.reduce_mean(x), {MEAN, SAME}),
    "both": (lambda x: tf.reduce_sum(x) - tf.reduce_mean(x), {SUM, MEAN}),
    "scaled": (lambda x: -3.0 * tf.reduce_mean(x) / 4.0, {MEAN}),
    "transposed": (lambda x: tf.reduce_sum(tf.transpose(x)), {SUM}),
    "einsum": (lambda x: tf.einsum("ij,ij->", x, x), {SUM}),
    "einsum with dots": (lambda x: tf.einsum("...j,...j->...", x, x)[:, None]
                         @ [[1.0]], None),
    "products": (lambda x: tf.matmul(x, x, transpose_a=True), {SUM}),
    "by label": (
        lambda x: tf.math.unsorted_segment_sum(
            x, tf.cast(x[:, 0] > 0, tf.int32), 2
        ),
        {SUM},
    ),
    "reshaped": (lambda x: tf.reduce_mean(tf.reshape(x, [-1])), {MEAN}),
    "own element": (
        lambda x: tf.reduce_mean(
            tf.gather_nd(x, tf.stack([rows_of(x), rows_of(x) * 0], 1))
        ),
        "unknown",
    ),
}  # fmt: skip
ROWS = {
    "layer": (lambda x: tf.nn.relu(tf.matmul(x, W) + 1.0), 0),
    "transposed": (lambda x: tf.matmul(W, x, True, True), 1),
    "softmax": (lambda x: tf.nn.log_softmax(x), 0),
    "expanded": (lambda x: x[tf.newaxis], 1),
    "sliced": (lambda x: x[:, 1:], 0),
    "tf.slice": (lambda x: tf.slice(x, [0, 1], [-1, 2]), 0),
    "tf.slice by size": (
        lambda x: tf.slice(x, [0, 1], [tf.shape(x)[0], 2]),
        0,
    ),
    "squeezed": (lambda x: tf.squeeze(x[:, :1], 1), 0),
    "joined": (lambda x: tf.concat([x, 2.0 * x], 1), 0),
    "stacked": (lambda x: tf.stack([x, x], 0), 1),
    "noise": (lambda x: tf.random.normal([tf.shape(x)[0], 4]), 0),
    "zeros": (lambda x: tf.zeros([tf.shape(x)[0], 4]), 0),
    "like": (lambda x: tf.ones_like(x) - x, 0),
    "one hot": (lambda x: tf.one_hot(tf.argmax(x, 1), 3), 0),
    "embedded": (lambda x: tf.gather(W, tf.argmax(x, 1)), 0),
    "flat": (lambda x: tf.reshape(x, [-1]), 0),
    "flat and back": (
        lambda x: tf.reshape(tf.reshape(x, [-1]), tf.shape(x)),
        0,
    ),
    "cross-entropy of steps": (
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.cast(x > 0, tf.int32), tf.stack([x, -x], -1)
        ),
        0,
    ),
    "heads": (lambda x: tf.reshape(x, [-1, 3, 1]), 0),
    "attention": (
        lambda x: tf.matmul(x[:, :, None], x[:, :, None], False, True),
        0,
    ),
}
COUPLED = {
    "root": lambda x: tf.sqrt(tf.reduce_mean(x * x)),
    "ratio": lambda x: tf.reduce_sum(x * mask(x)) / tf.reduce_sum(mask(x)),
    "by column": lambda x: tf.reduce_mean(
        tf.reduce_sum(x * mask(x), 0) / tf.reduce_sum(mask(x), 0)
    ),
    "centred": lambda x: x - tf.reduce_mean(x, 0),
    "normalised": lambda x: tf.reduce_sum(x / tf.reduce_sum(x)),
    "largest": lambda x: tf.reduce_max(x),
    "chosen": lambda x: tf.where(
        tf.reduce_sum(x) > 0, tf.reduce_sum(x), tf.reduce_mean(x)
    ),
    "product of means": lambda x: tf.reduce_mean(x) * tf.reduce_mean(x * x),
    "integer": lambda x: tf.cast(tf.reduce_mean(x), tf.int32),
}
UNKNOWN = {
    "pairs": lambda x: tf.matmul(x, x, transpose_b=True),
    "pairs by broadcast": lambda x: x[:, :1] - tf.transpose(x[:, :1]),
    "tf.slice of rows": lambda x: tf.slice(x, [1, 0], [-1, 3]),
    "first rows by tf.slice": lambda x: tf.slice(x, [0, 0], [2, 3]),
    "neighbours": lambda x: x[1:] - x[:-1],
    "along the batch": lambda x: tf.cumsum(x, 0),
    "softmax over the batch": lambda x: tf.nn.softmax(x[:, 0]),
    "numbers of rows": lambda x: tf.cast(rows_of(x), tf.float32) * x[:, 0],
    "shuffled": lambda x: tf.random.shuffle(x),
    "some rows": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "branch": lambda x: tf.cond(
        tf.constant(True), lambda: tf.reduce_sum(x), lambda: 0.0
    ),
    "loop": lambda x: tf.map_fn(tf.reduce_sum, x),
    "sorted": lambda x: tf.sort(x[:, 0]),
    "diagonal": lambda x: tf.linalg.trace(tf.matmul(x, x, False, True)),
}


def kind_of(formula, batch=None, samples=None):
    """The kind of a formula's value, of a batch of a known size or not."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([batch, 3])])
    def step(x):
        value = formula(x)
        found.append(BatchDependence(samples).of(value))
        return value

    step.get_concrete_function()
    return found[0]


@pytest.mark.parametrize("batch", [None, 8])
@pytest.mark.parametrize("name", LINEAR)
def test_linear_combinations_of_sums_and_means(name, batch):
    formula, parts = LINEAR[name]
    kind = kind_of(formula, batch, batch)
    if parts is None:
        assert kind == kinds.Kind(kinds.ROWS, 0)
    elif parts == "unknown":
        assert kind.name == parts
    else:
        assert (kind.name, kind.parts) == (kinds.LINEAR, parts)


@pytest.mark.parametrize("batch", [None, 8])
@pytest.mark.parametrize("name", ROWS)
def test_rows_follow_from_their_own_sample(name, batch):
    formula, axis = ROWS[name]
    if batch and name in ("noise", "zeros", "tf.slice by size"):
        pytest.skip("a constant shape does not tell")
    assert kind_of(formula, batch, batch) == kinds.Kind(kinds.ROWS, axis)


@pytest.mark.parametrize("name", COUPLED)
def test_functions_of_sums_and_means(name):
    assert kind_of(COUPLED[name]).name == kinds.COUPLED


@pytest.mark.parametrize("batch", [None, 8])
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_has_no_rule_is_unknown_and_names_an_op(name, batch):
    kind = kind_of(UNKNOWN[name], batch, batch)
    assert kind.name == kinds.UNKNOWN
    assert kind.cause is not None


def test_a_gradient_adds_outputs_to_a_loop():
    """Kinds may be known before a loop is differentiated."""
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        dependence = BatchDependence(None)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.map_fn(lambda row: row * tf.reduce_sum(row), x)
        found.append(dependence.of(value))
        found.append(dependence.of(tape.gradient(value, x)))
        return value

    step.get_concrete_function()
    assert [kind.name for kind in found] == [kinds.UNKNOWN] * 2


def test_one_element_of_each_row_by_its_number():
    def chosen(x):
        best = tf.argmax(x, 1, output_type=tf.int32)
        return tf.gather_nd(x, tf.stack([rows_of(x), best], 1))

    assert kind_of(chosen) == kinds.Kind(kinds.ROWS, 0)


def test_tensordot_of_a_fixed_batch():
    assert kind_of(lambda x: tf.tensordot(x, x, 2), 8, 8).parts == {SUM}


def test_a_feature_dimension_may_equal_the_batch():
    """`reduce_mean(z, 0)` of [8, 8] has no batch axis."""

    def penalty(x):
        z = tf.matmul(x, tf.ones([3, 8]))
        return tf.reduce_sum(tf.reduce_mean(z, 0))

    assert kind_of(penalty, 8, 8).parts == {MEAN}


def test_constants_that_are_sizes():
    def mean(x):
        return tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32)

    def centred(x):
        return x / tf.cast(tf.shape(x)[0], tf.float32)

    def of_weights(x):
        return tf.reduce_sum(W) / tf.cast(tf.size(tf.ones([8, 3])), tf.float32)

    def by_features(x):
        return tf.reduce_sum(x) / tf.cast(tf.shape(x)[1], tf.float32)

    assert kind_of(mean, 8, 8).parts == {MEAN}
    assert kind_of(by_features, 8, 8).parts == {SUM}
    assert kind_of(centred, 8, 8).name == kinds.COUPLED
    assert kind_of(of_weights, 8, 8).name == kinds.SAME


def test_a_sum_of_sums_divided_by_the_samples_is_a_mean():
    """As Keras 3 divides the loss of an activity regularizer."""

    @tf.function(input_signature=[tf.TensorSpec([8, 3])])
    def step(x):
        known = BatchDependence(8)
        both = 0.1 * tf.reduce_sum(x) + 0.2 * tf.reduce_sum(tf.square(x))
        assert known.of(tf.math.divide_no_nan(both, 8.0)).parts == {MEAN}
        assert known.of(both / 24.0).parts == {MEAN}
        assert known.of(both / 7.0).parts == {SUM}
        return x

    step.get_concrete_function()


def test_a_constant_equal_to_the_samples_is_noted():
    notes = []

    @tf.function(input_signature=[tf.TensorSpec([8, 3])])
    def step(x):
        known = BatchDependence(8)
        assert known.of(tf.reduce_sum(x) / 8.0).parts == {MEAN}
        assert known.of(tf.reduce_sum(x) / 7.0).parts == {SUM}
        ones = tf.ones_like(x)
        mean = tf.reduce_sum(x * ones) / tf.reduce_sum(ones)
        assert known.of(mean).parts == {MEAN}
        assert known.of(0.125 * tf.reduce_sum(x)).parts == {SUM}
        assert known.of(tf.reduce_sum(x) * 0.1).parts == {SUM}
        notes.extend(op.type for op in known.by_constant)
        return x

    step.get_concrete_function()
    assert notes == ["RealDiv", "RealDiv", "Mul"]


def test_what_follows_from_constants():
    variable, constant = tf.Variable(2.0), tf.constant([1.0, 2.0])
    found = {}

    @tf.function(input_signature=[tf.TensorSpec([8, 3])])
    def step(x):
        values = {
            "ones": tf.reduce_sum(tf.ones_like(x)),
            "captured": constant * 3.0,
            "variable": variable * 3.0,
            "batch": tf.reduce_sum(x),
        }
        found.update(
            {k: kinds.follows_from_constants(v) for k, v in values.items()}
        )
        return x

    step.get_concrete_function()
    assert found == {
        "ones": True,
        "captured": True,
        "variable": False,
        "batch": False,
    }


def test_constants_and_captured_tensors_are_the_same_on_all_ranks():
    table = tf.constant(W)
    outer = tf.constant(LABELS)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        known = BatchDependence()
        assert known.of(tf.reduce_sum(table)).name == SAME
        assert known.of(outer + 1).name == SAME
        return x

    step.get_concrete_function()


def test_rows_of_all_ranks_are_the_same_on_each():
    group = types.SimpleNamespace(world_size=2, handle=-1)

    def kind(formula):
        with tf.Graph().as_default():
            x = tf.compat.v1.placeholder(tf.float32, [None, 3])
            rows, _ = collective_ops.all_gather(group, x, tag=2)
            return BatchDependence().of(formula(x, rows))

    assert kind(lambda x, rows: tf.sqrt(tf.reduce_sum(rows))).name == SAME
    assert kind(lambda x, rows: tf.reduce_sum(x) / samples(x)).parts == {MEAN}
    assert kind(lambda x, rows: tf.reduce_sum(x) / samples(rows)).parts == {SUM}
    assert kind(lambda x, rows: x @ tf.transpose(rows)).axis == 0
