# SPDX-License-Identifier: Apache-2.0
"""What the objects of a checkpoint are to the ranks.

Nothing here looks up attributes of a distributed variable that it may not
have: it would ask its value for them, and a summed one gets that by an
exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import value_of


def variable_of(trackable: Any) -> Any:
    """TensorFlow's variable of one of Keras's; anything else as it is."""
    if isinstance(trackable, internals.DistributedValues):
        return trackable
    return value_of(trackable)


def collectives_of(objects: Iterable[Any]) -> Collectives | None:
    """The ranks that share any of the objects, None if none is shared."""
    for found in map(variable_of, objects):
        if isinstance(found, internals.DistributedValues):
            strategy = found._distribute_strategy
            collectives = getattr(strategy, "collectives", None)
        else:
            collectives = marks.collectives_of_shard(found)
        if isinstance(collectives, Collectives):
            return collectives
    return None


def is_shard(trackable: Any) -> bool:
    """Whether it is a part of a partitioned table or slot."""
    found = variable_of(trackable)
    if isinstance(found, internals.DistributedValues):
        return False
    return marks.collectives_of_shard(found) is not None


def slicing(trackable: Any) -> Any:
    """How what grows is read of a smaller checkpoint, None of all else."""
    found = variable_of(trackable)
    if isinstance(found, internals.DistributedValues):
        return None
    return marks.slicing(found)


def is_sum(trackable: Any) -> bool:
    """Whether reading it is an exchange, as of a metric of tf_keras."""
    return isinstance(variable_of(trackable), internals.SyncOnReadVariable)


def is_of_one_rank(trackable: Any) -> bool:
    """Whether every rank has a state of its own, as a dataset's place."""
    return isinstance(trackable, tf.data.Iterator)


def name_of_rank(name: str, rank: int) -> str:
    """Name under which a rank saves such a state."""
    return f"{name}/rank_{rank}" if rank else name
