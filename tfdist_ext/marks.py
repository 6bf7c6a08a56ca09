# SPDX-License-Identifier: Apache-2.0
"""The attributes that this package sets on objects of TensorFlow and Keras."""

from __future__ import annotations

from typing import Any

from tfdist_ext.tables.shard_spec import ShardSpec


def shard_spec(variable: Any) -> ShardSpec | None:
    """What a variable (TensorFlow's or Keras's) holds, None if no shard."""
    for _ in range(2):
        # A distributed variable asks its value for what it has not itself,
        # and a summed one (a metric of tf_keras) gets that by an exchange.
        if variable is None or hasattr(type(variable), "_get_cross_replica"):
            return None
        if "_tfdist_shard" in getattr(variable, "__dict__", ()):
            break
        variable = getattr(variable, "_value", None)
    return getattr(variable, "_tfdist_shard", None)
