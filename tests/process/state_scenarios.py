# SPDX-License-Identifier: Apache-2.0
"""Variables that steps assign, against those of one process."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from state_models import KERAS_3
from state_models import Stateful
from state_models import fitted

keras = tf.keras


def of_one_process(strategy, folder, name, options):
    """Losses and variables of a model that is trained without a strategy."""
    return fitted(strategy, name, **options)


def as_one_process(strategy, folder, name, options, expected):
    """The same on ranks; also without samples on some."""
    losses, values = fitted(strategy, name, **options)
    np.testing.assert_allclose(losses, expected[0], rtol=1e-4)
    for value, other in zip(values, expected[1], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)


def equal_on_ranks(strategy, folder, name, options):
    """What one process has, nobody can tell; all ranks have the same."""
    return [value.tobytes() for value in fitted(strategy, name, **options)[1]]


def exchanges(strategy, folder, name):
    """How often values are exchanged that are equal anyway."""
    before = strategy.statistics()["labels"].get("state", [0])[0]
    fitted(strategy, name)
    return strategy.statistics()["labels"].get("state", [0])[0] - before


def named_once(strategy, folder, name):
    """The lines of the log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log = logging.getLogger("tfdist_ext")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        fitted(strategy, name)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return [line for line in lines if "Assigned in a step" in line]


def refused(strategy, folder, dtype):
    """An integer, or a truth value, that says nothing of ranks."""

    class Counter(Stateful):
        def build(self, shape):
            self.count = self.state("count", dtype=dtype)

        def call(self, x, training=False):
            if training:
                self.count.assign(tf.cast(tf.shape(x)[0], dtype))
            return x

    with strategy.scope():
        model = keras.Sequential([Counter(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones([8, 4], np.float32)
    with pytest.raises(ValueError, match=r"only_first_replica|ONLY_FIRST") as e:
        model.fit(x, x[:, :1], batch_size=8, verbose=0)
    assert "count" in str(e.value)
    assert ("tf.VariableAggregation" in str(e.value)) != KERAS_3
    model.evaluate(x, x[:, :1], verbose=0)  # assigns nothing
