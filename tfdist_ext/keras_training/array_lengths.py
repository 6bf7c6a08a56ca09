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

keras = tf.keras


class _Now(threading.local):
    several: bool = False  # ranks are in a loop of Keras


_now = _Now()


def in_loop(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = model.distribute_strategy
    outer = _now.several
    _now.several = getattr(strategy, "collectives", None) is not None
    try:
        return original(model, *args, **kwargs)
    finally:
        _now.several = outer


def keep_lengths(original: Any, adapter: Any) -> tf.data.Dataset:
    dataset = original(adapter)
    batches = adapter.num_batches
    if not _now.several or batches is None:
        return dataset
    return dataset.apply(tf.data.experimental.assert_cardinality(batches))
