# SPDX-License-Identifier: Apache-2.0
"""Warnings of steps that compute with the rows of a table's gradient."""

import warnings

import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import Embedding

keras = tf.keras


def of_rows(change):
    def changed(slices):
        return tf.IndexedSlices(
            change(slices.values), slices.indices, slices.dense_shape
        )

    return changed


def decayed(slices):
    rows = slices.values + 0.01 * tf.ones_like(slices.values)
    return tf.IndexedSlices(rows, slices.indices, slices.dense_shape)


def checked(slices):
    tf.debugging.assert_all_finite(slices.values, "not finite")
    return slices


def clipped_by_its_own_norm(rows):
    return rows * tf.minimum(1.0, 0.05 / (tf.norm(rows) + 1e-9))


WARNED = {
    "clip_by_norm": (lambda g: tf.clip_by_norm(g, 0.05), "clip_by_norm"),
    "clip_by_global_norm": (
        lambda g: tf.clip_by_global_norm([g], 0.05)[0][0],
        "clip_by_global_norm",
    ),
    "clip_by_value": (lambda g: tf.clip_by_value(g, -0.01, 0.01), "Minimum"),
    "square": (of_rows(tf.square), "Square"),
    "times_itself": (of_rows(lambda r: r * r), "Mul"),
    "own_norm": (of_rows(clipped_by_its_own_norm), "Mul"),
    "sign": (of_rows(tf.sign), "Sign"),
    "one_over": (of_rows(lambda r: 1.0 / (r + r)), "RealDiv"),
    "decay": (decayed, "AddV2"),
}
SILENT = {
    "nothing": lambda g: g,
    "half": of_rows(lambda r: 0.5 * r),
    "divided": of_rows(lambda r: r / 2.0),
    "negative": of_rows(lambda r: -r),
    "twice": of_rows(lambda r: r + r),
    "checked": checked,
}


@tfdist_ext.optimizers.element_wise
class Cubes(keras.optimizers.SGD):
    """Its update is not linear in the gradient."""

    def update_step(self, gradient, variable, *rate):
        gradient = tf.convert_to_tensor(gradient) ** 3
        super().update_step(gradient, variable, *rate)


def said(change, eager=False, kind=keras.optimizers.SGD, updates=1):
    """Messages of a step that changes a table's gradient."""
    strategy = tfdist_ext.HybridParallelStrategy()
    with strategy.scope():
        layer = Embedding(10, 4)
        layer.build([None, 3])
        optimizer = kind(0.1)
        optimizer.build(layer.trainable_variables)
    (table,) = layer.trainable_variables

    def step(ids):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(layer(ids) ** 2)
        (gradient,) = tape.gradient(value, [table])
        for _ in range(updates):
            optimizer.apply_gradients([(change(gradient), table)])

    run = step if eager else tf.function(step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.run(run, args=(tf.constant([[1, 2, 1]]),))
    strategy.close()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("name", WARNED)
def test_what_is_not_linear_in_the_rows_is_named_with_its_line(name):
    change, what = WARNED[name]
    messages = said(change)
    assert any(what in each and "one row per id" in each for each in messages)
    by_line = "test_processed_rows.py:" in messages[0]
    assert by_line or f"`tf.{name}`" in messages[0]


@pytest.mark.parametrize("name", SILENT)
def test_what_is_linear_is_not_named(name):
    assert said(SILENT[name]) == []


def test_eager_steps_are_told_of_norms():
    (message,) = said(lambda g: tf.clip_by_norm(g, 0.05), eager=True)
    assert "`tf.clip_by_norm` gets" in message


def test_an_earlier_update_is_not_named():
    messages = said(SILENT["nothing"], kind=Cubes, updates=2)
    assert not [each for each in messages if "computes with" in each]


@pytest.mark.skipif(
    not hasattr(keras, "ops"), reason="tf_keras sums the rows of an id"
)
@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        (keras.optimizers.Adam, "trains"),
        (keras.optimizers.Adadelta, "trains"),
        (Cubes, "may train"),
    ],
)
def test_optimizers_that_square_each_occurrence_are_named(kind, verb):
    (message,) = said(SILENT["nothing"], kind=kind)
    assert f"Optimizer {kind.__name__} of Keras 3" in message
    assert "'embeddings'" in message
    assert f"So it {verb} other weights" in message


@pytest.mark.parametrize(
    "kind", [keras.optimizers.Lion, tfdist_ext.optimizers.Adam]
)
def test_optimizers_that_use_the_sum_are_not_named(kind):
    assert said(SILENT["nothing"], kind=kind) == []
