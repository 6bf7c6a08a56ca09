# SPDX-License-Identifier: Apache-2.0
"""Cases of losses and metrics, on ranks and without a strategy."""

import warnings

import numpy as np
import pytest
import tensorflow as tf
import whole_batch_models as models
from whole_batch_cases import CASES
from whole_batch_models import OPTIONS
from whole_batch_models import compiled
from whole_batch_models import plain

from tfdist_ext.losses import batch_mean
from tfdist_ext.losses import batch_sum
from tfdist_ext.losses import gather_batch

keras = tf.keras


def trained(strategy, folder, name):
    """What a case trains and reports, by name.

    Args:
        strategy: of some ranks, or None.
        folder: nothing is written.
        name: of the case.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return CASES[name](strategy)


def as_one_process(strategy, folder, expected):
    """Runs cases, which must give what one process gives.

    Args:
        strategy: of some ranks.
        folder: nothing is written.
        expected: what `trained` has returned, by case.
    """
    for name, values in expected.items():
        found = trained(strategy, folder, name)
        assert set(found) == set(values), name
        for key, value in values.items():
            np.testing.assert_allclose(
                *(found[key], value),
                rtol=2e-4,
                atol=2e-5,
                err_msg=f"{name}: {key}",
            )


DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int8"]
DTYPES += ["int16", "int32", "int64", "uint64", "bool", "string"]


def _rows_of(rank):
    """Rows of which the ranks have different numbers, the first one none."""
    return np.arange(rank * 4).reshape([rank * 2, 2]) + 100 * rank


def _as_dtype(values, dtype):
    if dtype == "string":
        texts = [[f"é{v}" * (v % 3) for v in r] for r in values]
        return tf.reshape(tf.constant(texts, tf.string), [-1, 2])
    return tf.reshape(tf.cast(values, dtype), [-1, 2])


def gathers_every_dtype(strategy, folder):
    """Rows of all ranks, in their order, in one exchange but for strings."""
    ranks = range(strategy.world_size)
    every = np.concatenate([_rows_of(rank) for rank in ranks])
    own = _rows_of(strategy.rank)
    mine = {dtype: _as_dtype(own, dtype) for dtype in DTYPES}
    mine["ragged"] = tf.RaggedTensor.from_row_lengths(
        tf.range(len(own) * strategy.rank), [strategy.rank] * len(own)
    )
    before = _calls(strategy)

    @tf.function
    def gather(values):
        return strategy.run(gather_batch, (values,))

    found = gather(mine)
    assert _calls(strategy) - before <= 5
    ragged = found.pop("ragged")
    assert ragged.row_lengths().numpy().tolist() == [
        rank for rank in ranks for _ in _rows_of(rank)
    ]
    for dtype, rows in found.items():
        assert rows.dtype == mine[dtype].dtype
        np.testing.assert_array_equal(rows, _as_dtype(every, dtype), dtype)
    np.testing.assert_array_equal(gather_batch(own), own)  # in no step
    for wrong, error in (
        (tf.constant(1.0), ValueError),
        (tf.sparse.from_dense([[1]]), TypeError),
        (tf.complex([1.0], [1.0]), TypeError),
    ):
        with pytest.raises(error, match="gather_batch takes"):
            gather_batch(wrong)
    with pytest.raises(TypeError, match="batch_mean takes floating"):
        batch_mean([1, 2])


def _calls(strategy):
    labels = strategy.statistics()["labels"]
    return sum(
        numbers[0]
        for label, numbers in labels.items()
        if label.startswith("losses/gather_batch")
    )


def _loss(factor, x, y):
    """A loss of which no part decomposes, with a gradient in it."""
    with tf.GradientTape() as tape:
        tape.watch(factor)
        predicted = factor * x
        inner = tf.sqrt(batch_sum(tf.square(predicted - y)) + 1.0)
    slope = tape.gradient(inner, factor)
    rows = gather_batch({"p": predicted, "y": y})
    error = tf.reduce_max(tf.abs(rows["p"] - rows["y"])) ** 2
    return slope, error + batch_mean(predicted**2, weights=tf.abs(y) + 0.5)


def in_own_loops(strategy, folder):
    """Gradients of the ranks, summed, are one process's; one has no rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[7]).astype(np.float32)
    y = rng.normal(size=[7]).astype(np.float32)
    last = strategy.rank == strategy.world_size - 1
    own = slice(7, 7) if last else slice(4 * strategy.rank, None)
    if not last and strategy.rank == 0:
        own = slice(0, 4 if strategy.world_size > 2 else 7)

    def step(x, y):
        factor = tf.constant(0.7)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(factor)
            slope, loss = _loss(factor, x, y)
        return loss, slope, tape.gradient(loss, factor)

    expected = step(x, y)  # in no step: plain sums and means
    run = lambda *values: strategy.run(step, values)  # noqa: E731
    for call in (run, tf.function(run)):
        loss, slope, gradient = call(tf.constant(x[own]), tf.constant(y[own]))
        parts = strategy.collectives.all_reduce([slope, gradient], "test")
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
        np.testing.assert_allclose(parts, expected[1:], rtol=1e-5)


def half_precision(strategy, folder):
    """Sums of narrow numbers neither overflow nor are rounded on the way."""

    def step(values):
        values = tf.cast(values, tf.float16)
        return batch_mean(values), batch_mean(values, weights=values)

    ranks = strategy.world_size
    means = strategy.run(step, (tf.fill([40_000], 2.0),))
    assert [float(each) for each in means] == [2.0, 2.0]
    assert means[0].dtype == tf.float16
    total = strategy.run(lambda: batch_sum(tf.constant([1.5, 1.0])))
    assert float(total) == 2.5 * ranks


def _fit_plain(strategy, loss, metrics=(), samples=16, units=1, **options):
    with strategy.scope():
        model = compiled(plain(units), loss, metrics=list(metrics), **options)
    x = np.ones([samples, 3], np.float32)
    y = np.ones([samples, units], np.float32)
    model.fit(x, y, batch_size=samples, verbose=0)
    return model


def refuses_other_rows(strategy, folder):
    """What is not one value per sample is refused by name."""

    with strategy.scope():
        metric = models.Largest("columns")

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = models.dense(4)

        def call(self, x):
            return self.dense(x)

        def test_step(self, data):
            x, y = data
            metric.update_state(y, tf.reduce_mean(self(x), 0))
            return {"columns": metric.result()}

    with strategy.scope():
        model = Model()
        model.compile(**OPTIONS)
    x = np.ones([6, 3], np.float32)
    with pytest.raises(ValueError, match=r"'columns'.*gather_batch"):
        model.evaluate(x, np.ones([6, 4], np.float32), verbose=0)


def warns_of_many_bytes(strategy, folder):
    """A loss that gathers more than 8 MB in a step says so, by name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit_plain(strategy, models.rmse, samples=1024, units=1200)
    texts = [str(each.message) for each in caught]
    (text,) = [each for each in texts if "whole batch" in each]
    assert "rmse" in text and "9.4 MB" in text and "batch_mean" in text
    labels = strategy.statistics()["labels"]
    assert labels["losses/whole batch"][1] > (4 << 20)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit_plain(strategy, "mse", samples=1024, units=1200)
    assert not [each for each in caught if "whole batch" in str(each.message)]


def gathers_once(strategy, folder):
    """A step with such losses and metrics gathers once; a plain one never."""
    with strategy.scope():
        metrics = [models.Largest(), models.Moving("b"), "mae"]
    for loss, more in ((models.rmse, 1), ("mse", 0)):
        before = strategy.statistics()["labels"].get("losses/whole batch", [0])
        _fit_plain(strategy, loss, metrics if more else ["mae"])
        after = strategy.statistics()["labels"].get("losses/whole batch", [0])
        assert after[0] - before[0] == more


def several_outputs_gather_once(strategy, folder):
    """Two losses of the whole batch, on two outputs, in one exchange."""
    with strategy.scope():
        x = keras.Input([3])
        outputs = {name: models.dense(name=name)(x) for name in "ab"}
        model = keras.Model(x, outputs)
        compiled(model, {"a": models.rmse, "b": models.masked})
    values = np.ones([8, 3], np.float32)
    labels = dict.fromkeys("ab", values[:, :1])
    before = strategy.statistics()["labels"].get("losses/whole batch", [0])
    model.fit(values, labels, batch_size=8, verbose=0)
    after = strategy.statistics()["labels"]["losses/whole batch"]
    assert after[0] - before[0] == 1


def refuses_optimizers_outside(strategy, folder):
    """An optimizer that is made outside of the scope is named."""
    with strategy.scope():
        model = plain()
    model.compile(keras.optimizers.SGD(0.1, name="outside"), "mse", **OPTIONS)
    x = np.ones([8, 3], np.float32)
    with pytest.raises(ValueError, match=r"'outside'.*strategy\.scope"):
        model.fit(x, x[:, :1], verbose=0)
