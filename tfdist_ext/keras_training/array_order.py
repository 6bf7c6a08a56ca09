# SPDX-License-Identifier: Apache-2.0
"""`fit` on arrays shuffles on every rank as on rank 0.

Keras draws the order of arrays from TensorFlow's generator. Ranks that have
drawn more numbers before, or have set other seeds, would draw another.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.collectives.first_rank import text_of_first_rank

keras = tf.keras


def shuffle_alike(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    collectives = getattr(model.distribute_strategy, "collectives", None)
    if collectives is None:
        return original(model, *args, **kwargs)
    given = inspect.signature(original).bind(model, *args, **kwargs).arguments
    if not given.get("shuffle", True) or not _is_of_arrays(given.get("x")):
        return original(model, *args, **kwargs)
    with _order_of_first_rank(collectives):
        return original(model, *args, **kwargs)


def _is_of_arrays(x: Any) -> bool:
    if x is None or isinstance(x, tf.data.Dataset):
        return False
    leaves = tf.nest.flatten(x)
    return all(hasattr(leaf, "shape") for leaf in leaves)


@contextlib.contextmanager
def _order_of_first_rank(collectives: Collectives) -> Iterator[None]:
    """Lets TensorFlow's generator be that of rank 0; all ranks must call."""
    own = internals.random_state()
    text = text_of_first_rank(json.dumps(own), collectives, "order of arrays")
    if collectives.group.rank == 0:
        yield
        return
    internals.set_random_state(json.loads(text))
    try:
        yield
    finally:
        internals.set_random_state(own)
