# SPDX-License-Identifier: Apache-2.0
"""Datasets that Keras 3 makes of arrays say how many batches they have.

Keras knows, but TensorFlow cannot tell. Ranks would ask each other at every
step whether any of them has data left, see `distribute.input`; that all have
arrays of one length is compared before, see `settings`.
"""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.wrapping import wrap

keras = tf.keras


class _Now(threading.local):
    several: bool = False  # ranks are in a loop of Keras


_now = _Now()


def install() -> None:
    """Wraps Keras 3's loops; it acts on models of our strategy only."""
    if keras_internals.KERAS_3:
        for name in keras_internals.LOOPS:
            wrap(keras.Model, name, _in_loop)
        wrap(keras_internals.array_adapter(), "get_tf_dataset", _dataset)


def _in_loop(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = model.distribute_strategy
    outer = _now.several
    _now.several = getattr(strategy, "collectives", None) is not None
    try:
        return original(model, *args, **kwargs)
    finally:
        _now.several = outer


def _dataset(original: Any, adapter: Any) -> tf.data.Dataset:
    dataset = original(adapter)
    batches = adapter.num_batches
    if not _now.several or batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))
