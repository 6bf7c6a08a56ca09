# SPDX-License-Identifier: Apache-2.0
"""CowClip: its options, what it changes, and what it cannot count."""

import math

import numpy as np
import pytest
import tensorflow as tf
import toy_problem

import tfdist_ext
from tfdist_ext import optimizers
from tfdist_ext.optimizers import CowClip

keras = tf.keras
ROWS, DIM = 12, 3


@pytest.mark.parametrize("name", ["ratio", "floor", "l2"])
@pytest.mark.parametrize("wrong", [-1.0, math.nan, "1", None, True])
def test_options_are_numbers_of_at_least_zero(name, wrong):
    with pytest.raises(ValueError, match=rf"`{name}`.*\(CowClip\)"):
        CowClip(**{name: wrong})


def test_a_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"`ratio` and `floor`.*row_clip=None"):
        CowClip(ratio=0, floor=0)


@pytest.mark.parametrize("wrong", [1.0, "CowClip", CowClip])
def test_row_clip_is_a_cow_clip(wrong):
    with pytest.raises(ValueError, match=r"`row_clip`.*CowClip\(ratio.*SGD"):
        optimizers.SGD(row_clip=wrong)


def test_unknown_fields_of_a_config_are_refused():
    config = optimizers.Adam(row_clip=CowClip()).get_config()
    config["row_clip"]["ratios"] = 1.0
    with pytest.raises(ValueError, match=r"row_clip of Adam.*'ratios'"):
        optimizers.Adam.from_config(config)


@pytest.mark.parametrize(
    "name", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "Ftrl"]
)
def test_config_round_trip(name):
    clip = CowClip(0.5, 1e-3, 1e-4)
    made = getattr(optimizers, name)(row_clip=clip)
    serialized = keras.optimizers.serialize(made)
    again = keras.optimizers.deserialize(serialized)
    assert again.row_clip == clip
    assert again.get_config() == made.get_config() | {"name": again.name}
    assert "row_clip" not in getattr(optimizers, name)().get_config()


def one_step(optimizer, ids, scale, initial):
    """The table after a step with the loss `scale * sum of its rows`."""
    table = tfdist_ext.layers.Embedding(
        ROWS, DIM, keras.initializers.Constant(initial)
    )
    table.build(())
    variable = table.trainable_variables[0]
    if hasattr(keras, "ops"):
        optimizer.build([variable])

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(table(tf.constant(ids)))
        gradient = tape.gradient(loss, [variable])
        optimizer.apply_gradients(zip(gradient, [variable], strict=True))

    step()
    return np.array(variable)


def test_long_and_short_gradients():
    """The limit is by row and sample; short gradients stay as they are."""
    initial = np.ones([ROWS, DIM], np.float32)
    initial[1] *= 100.0
    initial[2] = 0.0
    ids = [[0, 1], [0, 2], [0, 3]]
    clip = CowClip(ratio=0.1, floor=0.02)
    found = one_step(optimizers.SGD(1.0, row_clip=clip), ids, 1.0, initial)
    norm = math.sqrt(DIM)
    # Rows 0 and 3: 0.1 of their norm for each id. Row 2: the floor.
    np.testing.assert_allclose(found[0], 1 - 3 * 0.1, rtol=1e-6)
    np.testing.assert_allclose(found[3], 1 - 0.1, rtol=1e-6)
    np.testing.assert_allclose(found[1], 99.0, rtol=1e-6)
    np.testing.assert_allclose(found[2], -0.02 / norm, rtol=1e-5)
    np.testing.assert_array_equal(found[4:], initial[4:])


def test_l2_is_added_to_rows_that_are_looked_up():
    initial = np.full([ROWS, DIM], 2.0, np.float32)
    clip = CowClip(ratio=1e6, l2=0.25)
    found = one_step(optimizers.SGD(1.0, row_clip=clip), [[5]], 1.0, initial)
    np.testing.assert_allclose(found[5], 2.0 - 1.0 - 0.5, rtol=1e-6)
    np.testing.assert_array_equal(np.delete(found, 5, 0), initial[1:])


def test_nan_stays():
    initial = np.ones([ROWS, DIM], np.float32)
    optimizer = optimizers.SGD(1.0, row_clip=CowClip())
    for scale in (math.nan, math.inf):
        found = one_step(optimizer, [[5]], scale, initial)
        assert np.isnan(found[5]).all()
        optimizer = optimizers.SGD(1.0, row_clip=CowClip())


def test_gradients_that_do_not_say_their_samples_are_refused():
    variables = toy_problem.make_variables()
    optimizer = optimizers.SGD(0.1, row_clip=CowClip())
    if hasattr(keras, "ops"):
        optimizer.build(variables)
    ((rows, grads),) = toy_problem.make_steps(1)
    sparse = toy_problem.sparse_gradients(rows, grads)
    with pytest.raises(ValueError, match=r"`row_clip` needs.*table.*Embedding"):
        optimizer.apply_gradients(list(zip(sparse, variables, strict=True)))


def test_dense_gradients_are_not_clipped():
    steps = toy_problem.make_steps(3)
    dense = toy_problem.dense_gradients
    clip = CowClip(ratio=1e-6, l2=1.0)
    found = toy_problem.train(optimizers.SGD(0.1, row_clip=clip), steps, dense)
    plain = toy_problem.train(optimizers.SGD(0.1), steps, dense)
    toy_problem.assert_same(found, plain)


@pytest.mark.parametrize("eager", [False, True])
def test_several_calls_of_a_layer(eager):
    """In a graph their samples add up; eagerly they are not known."""
    table = tfdist_ext.layers.Embedding(
        ROWS, DIM, "ones", sharding="data_parallel"
    )
    inputs = keras.Input([2], dtype="int64")
    rows = table(inputs[:, :1]) + table(inputs[:, 1:])
    model = keras.Model(inputs, keras.layers.Flatten()(rows))
    clip = CowClip(ratio=0.1)
    model.compile(
        optimizers.SGD(1.0, row_clip=clip),
        lambda y, x: 1e3 * tf.reduce_sum(x, -1),
        run_eagerly=eager,
    )
    x = np.array([[0, 0], [0, 1]])
    if eager:
        with pytest.raises(ValueError, match=r"called only once.*graph"):
            model.fit(x, np.zeros([2, DIM]), batch_size=2, verbose=0)
        return
    model.fit(x, np.zeros([2, DIM]), batch_size=2, verbose=0)
    found = table.get_weights()[0]
    np.testing.assert_allclose(found[0], 1 - 3 * 0.1, rtol=1e-5)
    np.testing.assert_allclose(found[1], 1 - 0.1, rtol=1e-5)
