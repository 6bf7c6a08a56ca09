# SPDX-License-Identifier: Apache-2.0
"""Models that are saved, and what must come back from a file."""

import contextlib

import numpy as np
import tensorflow as tf
from fit_models import data
from fit_models import make_model

keras = tf.keras


def trained(strategy, sharding="row"):
    """A model whose optimizer has slots that are not all equal."""
    model = make_model(strategy, sharding=sharding)
    model.fit(data(), epochs=1, verbose=0)
    return model


def state(strategy, model):
    """Whole tables and slots, dense weights, iterations; on every rank."""
    variables = [*model.optimizer.variables, *model.variables]
    return [strategy.gather_table(variable) for variable in variables]


def weights(strategy, model):
    """Whole tables and dense weights, on every rank."""
    return [strategy.gather_table(v) for v in model.weights]


def assert_equal(values, expected):
    for a, b in zip(values, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def names_in(folder):
    """Files below a folder, as they are called there."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@contextlib.contextmanager
def refused(error, *texts):
    """What is inside must fail, with these texts in the message.

    A rank that another one's failure reaches before its own sees an
    AbortedError with the same text.
    """
    try:
        yield
    except error as caught:
        for text in texts:
            assert text in str(caught), str(caught)
    else:
        raise AssertionError(f"not refused: {texts}")


def goes_on(strategy, model):
    """The group is usable after an error."""
    total = strategy.reduce("SUM", tf.constant(1.0), axis=None)
    assert float(total) == strategy.world_size
    model.fit(data(), epochs=1, verbose=0)
