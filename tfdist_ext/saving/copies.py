# SPDX-License-Identifier: Apache-2.0
"""`copy.deepcopy`, `copy.copy` and `pickle` of what holds partitioned tables.

Keras writes and reads a whole model for them, alone: a rank would have whole
tables or none, and the optimizer's slots of its part. So they are refused.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist_ext.marks import shard_spec
from tfdist_ext.optimizers.keras_versions import KERAS_3
from tfdist_ext.saving import model_shards

keras = tf.keras


def install() -> None:
    """Wraps what Python calls to copy models, layers and optimizers."""
    _wrap(keras.layers.Layer, "__reduce_ex__")
    _wrap(keras.optimizers.Optimizer, "__reduce_ex__")
    if not KERAS_3:
        _wrap(keras.Model, "__deepcopy__")


def _wrap(owner: Any, name: str) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, argument: Any) -> Any:
        _refuse_shards(self)
        return original(self, argument)

    setattr(owner, name, wrapped)


def _refuse_shards(copied: Any) -> None:
    # Models of tf_keras that are not built cannot tell their variables.
    if not getattr(copied, "built", True):
        return
    shards = model_shards.shards_of(copied)
    if not shards:
        return
    spec = shard_spec(shards[0])
    assert spec is not None
    raise ValueError(
        f"{type(copied).__name__} '{copied.name}' cannot be copied or pickled: "
        f"{spec.world_size} ranks hold a part each of table '{spec.table}'. "
        "For a second model, make it again under strategy.scope() on all "
        "ranks, by keras.models.clone_model(model) or as you made the first, "
        "and then again.set_weights(model.get_weights()). To keep or send "
        "one, save it: see docs/checkpoints.md."
    )
