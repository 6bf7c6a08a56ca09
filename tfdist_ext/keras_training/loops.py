# SPDX-License-Identifier: Apache-2.0
"""Keras's loops (`fit` and the like) as what all ranks do together.

An exception that one rank alone meets (in a callback, a dataset, while it
traces) would leave the others waiting for it until they time out, with the
reason lost. The wrappers here tell them, so that the loop ends everywhere
with that reason and the program may go on.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.sums import sum_over_ranks

keras = tf.keras

_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def on_all_ranks(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    collectives = collectives_of(model)
    if collectives is None:
        return original(model, *args, **kwargs)
    name = original.__name__
    if name in ("fit", "train_on_batch"):
        _warn_of_eager_steps(model)
    # Nobody goes on from a loop that has failed elsewhere; a batch is too
    # short for that.
    loop = name in keras_internals.LOOPS
    with collectives.together(name, all_end=loop, own_first=True):
        return original(model, *args, **kwargs)


def _warn_of_eager_steps(model: Any) -> None:
    """Says what `whole_batch` cannot tell of a step that has no graph."""
    own = type(model).train_step is not keras.Model.train_step
    if own and model.run_eagerly:
        warnings.warn(
            "With run_eagerly=True ranks cannot tell a sum over the samples "
            "from a mean. A loss that `train_step` sums by hand would train "
            "with too small gradients: use means (tf.reduce_mean, a loss of "
            "Keras), or leave run_eagerly off.",
            stacklevel=4,
        )


def build_on_all_ranks(
    original: Any, optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Lets an optimizer be built once all ranks have come to it.

    Keras marks it as built before it has made its slots. Had another rank
    failed before, they would be missing for ever.
    """
    collectives = collectives_lib.active()
    if collectives is not None and not keras_internals.is_built(optimizer):
        with tf.init_scope():
            collectives.barrier("optimizer/build")
    return original(optimizer, *args, **kwargs)


def finite_on_all_ranks(original: Any, optimizer: Any, grads: Any) -> Any:
    """Lets ranks agree whether Keras 3's loss scale skips a step.

    Keras asks before the gradients are summed, so that one rank's may be
    infinite alone.
    """
    finite = original(optimizer, grads)
    return sum_over_ranks(
        tf.cast(tf.logical_not(finite), tf.float32), "gradients/finite"
    ) == tf.constant(0.0)


def average_of_rows(
    original: Any, optimizer: Any, variables: Sequence[Any]
) -> None:
    """Lets Keras 3 average the tables of which this rank has no rows.

    Its `ops.add` takes a tensor without rows for a bias, and fails.
    """
    if not optimizer.use_ema or collectives_lib.active() is None:
        return original(optimizer, variables)
    averages = keras_internals.averages_of(optimizer)
    pairs = zip(variables, averages, strict=True)
    kept = [pair for pair in pairs if 0 not in pair[0].shape]
    state = keras_internals.averages_state(
        optimizer, [average for _, average in kept]
    )
    # Their values: a part of a table is refused where it stands for all.
    read = [keras_internals.value_of(v).read_value() for v, _ in kept]
    return original(state, read)


def collectives_of(model: Any) -> Collectives | None:
    """Those of the strategy of a model; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)
