# SPDX-License-Identifier: Apache-2.0
"""Keras's loops (`fit` and the like) as what all ranks do together.

An exception that one rank alone meets (in a callback, a dataset, while it
traces) would leave the others waiting for it until they time out, with the
reason lost. The wrappers here tell them, so that the loop ends everywhere
with that reason and the program may go on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.distribute import collectives as collectives_lib
from tfdist_ext.distribute.collectives import Collectives

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


def _together(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = collectives_of(self)
        if collectives is None:
            return original(self, *args, **kwargs)
        # Nobody goes on from a loop that has failed elsewhere; a batch is too
        # short for that.
        with collectives.together(name, all_end=name in _LOOPS):
            return original(self, *args, **kwargs)

    wrapped._tfdist_original = original  # type: ignore[attr-defined]
    return wrapped


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


def collectives_of(model: Any) -> Collectives | None:
    """Of the strategy a model was made under; None with a single process."""
    return getattr(model.distribute_strategy, "collectives", None)
