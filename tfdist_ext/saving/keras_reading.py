# SPDX-License-Identifier: Apache-2.0
"""Files of Keras read by several ranks, each its part of the tables.

All ranks read the same file, which holds whole tables: that at the path of
rank 0. One that cannot read it ends the reading of all.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.first_rank import path_to_read
from tfdist_ext.saving import model_shards
from tfdist_ext.sharding import whole_tables

keras = tf.keras


class _Reading(threading.local):
    depth = 0


_reading = _Reading()


def read_on_all_ranks(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Reads by a function that takes a path, or a model and a path.

    The path of rank 0 counts.
    """
    bound = inspect.signature(original).bind(*args, **kwargs)
    first = next(iter(bound.arguments.values()))
    if isinstance(first, keras.Model):
        collectives = model_shards.collectives_of(first)
    else:  # the model will be one of the strategy in scope
        collectives = model_shards.while_open(collectives_lib.active())
    if collectives is None:
        return original(*args, **kwargs)
    _reading.depth += 1
    try:
        with collectives.together("load a file of Keras", all_end=True):
            if _reading.depth == 1 and "filepath" in bound.arguments:
                path = bound.arguments["filepath"]
                path = path_to_read(path, collectives)
                bound.arguments["filepath"] = path
            return original(*bound.args, **bound.kwargs)
    finally:
        _reading.depth -= 1


def refuse_tables(
    original: Any, group: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """Legacy files compare a table's shape with a shard's, or skip it."""
    collectives = model_shards.collectives_of(model)
    if collectives is not None and model_shards.shards_of(model):
        raise ValueError(
            "Partitioned tables cannot be read from a file in Keras's "
            f"legacy format. Received: '{group.file.filename}'. Load it "
            "in one process, save .weights.h5 there and load that."
        )
    return original(group, model, *args, **kwargs)


def read_part_of_slots(original: Any, optimizer: Any, store: Any) -> None:
    """Lets optimizers read their part of the whole slots in a file."""
    shards = model_shards.only_shards(list(optimizer.variables))
    assign = whole_tables.assign_part
    with model_shards.methods(shards, assign=assign):
        original(optimizer, store)


def read_arrays(original: Any, layer: Any, store: Any) -> None:
    """Lets tf_keras divide what it reads: a summed variable's value.

    Its layers assign datasets of h5py, which know no division.
    """
    original(layer, {name: store[name][()] for name in store})
