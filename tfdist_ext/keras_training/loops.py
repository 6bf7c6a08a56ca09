# SPDX-License-Identifier: Apache-2.0
"""Keras's loops (`fit` and the like) as what all ranks do together.

An exception that one rank alone meets (in a callback, a dataset, while it
traces) would leave the others waiting for it until they time out, with the
reason lost. The wrappers here tell them, so that the loop ends everywhere
with that reason and the program may go on.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.collectives import Collectives

keras = tf.keras

_LOOPS = ("fit", "evaluate", "predict")
_BATCHES = ("train_on_batch", "test_on_batch", "predict_on_batch")


def install() -> None:
    """Wraps Keras's loops; they act on models of our strategy only."""
    for name in (*_LOOPS, *_BATCHES):
        original = getattr(keras.Model, name)
        if not hasattr(original, "_tfdist_original"):
            setattr(keras.Model, name, _together(name, original))
    build = keras.optimizers.Optimizer.build
    if not hasattr(build, "_tfdist_original"):
        keras.optimizers.Optimizer.build = _when_all_build(build)
    scaled = getattr(keras.optimizers, "LossScaleOptimizer", None)
    if scaled and not hasattr(scaled.check_finite, "_tfdist_original"):
        scaled.check_finite = _finite_everywhere(scaled.check_finite)
    average = keras.optimizers.Optimizer._update_model_variables_moving_average
    if hasattr(keras, "ops") and not hasattr(average, "_tfdist_original"):
        keras.optimizers.Optimizer._update_model_variables_moving_average = (
            _average_of_rows(average)
        )


def _together(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_of(self)
        if collectives is None:
            return original(self, *args, **kwargs)
        if name in ("fit", "train_on_batch"):
            _warn_of_eager_steps(self)
        # Nobody goes on from a loop that has failed elsewhere; a batch is too
        # short for that.
        with collectives.together(name, all_end=name in _LOOPS):
            return original(self, *args, **kwargs)

    wrapped._tfdist_original = original  # type: ignore[attr-defined]
    return wrapped


def _warn_of_eager_steps(model: Any) -> None:
    """Says what `whole_batch` cannot tell of a step that has no graph."""
    own = type(model).train_step is not keras.Model.train_step
    if own and model.run_eagerly:
        warnings.warn(
            "With run_eagerly=True ranks cannot tell a sum over the samples "
            "from a mean. A loss that `train_step` sums by hand would train "
            "with too small gradients: use means (tf.reduce_mean, a loss of "
            "Keras), or leave run_eagerly off.",
            stacklevel=3,
        )


def _when_all_build(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an optimizer be built once all ranks have come to it.

    Keras marks it as built before it has made its slots. Had another rank
    failed before, they would be missing for ever.
    """

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_lib.active()
        built = getattr(self, "built", getattr(self, "_built", False))
        if collectives is not None and not built:
            with tf.init_scope():
                collectives.barrier("optimizer/build")
        return original(self, *args, **kwargs)

    build._tfdist_original = original  # type: ignore[attr-defined]
    return build


def _finite_everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets ranks agree whether Keras 3's loss scale skips a step.

    Keras asks before the gradients are summed, so that one rank's may be
    infinite alone.
    """

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        return collectives_lib.sum_over_ranks(
            tf.cast(tf.logical_not(finite), tf.float32), "gradients/finite"
        ) == tf.constant(0.0)

    check_finite._tfdist_original = original  # type: ignore[attr-defined]
    return check_finite


def _average_of_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Lets Keras 3 average the tables of which this rank has no rows.

    Its `ops.add` takes a tensor without rows for a bias, and fails.
    """

    @functools.wraps(original)
    def average(self: Any, variables: Sequence[Any]) -> None:
        if not self.use_ema or collectives_lib.active() is None:
            return original(self, variables)
        pairs = zip(
            variables, self._model_variables_moving_average, strict=True
        )
        kept = [pair for pair in pairs if 0 not in pair[0].shape]
        state = types.SimpleNamespace(
            use_ema=True,
            ema_momentum=self.ema_momentum,
            iterations=self.iterations,
            _model_variables_moving_average=[mean for _, mean in kept],
        )
        # Their values: a part of a table is refused where it stands for all.
        read = [getattr(v, "_value", v).read_value() for v, _ in kept]
        return original(state, read)

    average._tfdist_original = original  # type: ignore[attr-defined]
    return average


def collectives_of(model: Any) -> Collectives | None:
    """Of the strategy a model was made under; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)
