# SPDX-License-Identifier: Apache-2.0
"""`copy.deepcopy`, `copy.copy` and `pickle` of what holds partitioned tables.

Keras writes and reads a whole model for them, alone: a rank would have whole
tables or none, and the optimizer's slots of its part. So they are refused.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.marks import shard_spec
from tfdist_ext.saving import model_shards

keras = tf.keras


def refuse_copy(original: Any, copied: Any, argument: Any) -> Any:
    _refuse_parts(copied)
    return original(copied, argument)


def _refuse_parts(copied: Any) -> None:
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
