# SPDX-License-Identifier: Apache-2.0
"""Files of Keras read by several ranks, each its part of the tables.

All ranks read the same file, which holds whole tables. One that cannot read
it ends the reading of all.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.optimizers.keras_versions import KERAS_3
from tfdist_ext.saving import model_shards
from tfdist_ext.sharding import whole_tables

keras = tf.keras


def install(saving: dict[str, Any]) -> None:
    """Wraps Keras's readers; they act on models of our strategy only.

    Args:
        saving: the module that `keras.models.load_model` is in.
    """
    if KERAS_3:
        hdf5 = saving["legacy_h5_format"]
        _read_together(hdf5, "load_model_from_hdf5")
    else:
        legacy = saving["legacy_sm_saving_lib"]
        hdf5 = legacy.hdf5_format
        _read_together(legacy, "load_model")
        _read_together(legacy, "load_weights")
        _read_arrays()
    _read_together(saving["saving_lib"], "load_model")
    _read_together(saving["saving_lib"], "load_weights_only")
    _refuse_tables(hdf5, "load_weights_from_hdf5_group")
    _refuse_tables(hdf5, "load_weights_from_hdf5_group_by_name")
    _read_part_of_slots()


def _read_together(module: Any, name: str) -> None:
    """Wraps a function whose first argument is a model, or else a path."""
    original = getattr(module, name)

    @functools.wraps(original)
    def read(first: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(first, keras.Model):
            collectives = model_shards.collectives_of(first)
        else:  # the model will be one of the strategy in scope
            collectives = collectives_lib.active()
        if collectives is None:
            return original(first, *args, **kwargs)
        with collectives.together("load a file of Keras", all_end=True):
            return original(first, *args, **kwargs)

    setattr(module, name, read)


def _refuse_tables(module: Any, name: str) -> None:
    """Legacy files compare a table's shape with a shard's, or skip it."""
    original = getattr(module, name)

    @functools.wraps(original)
    def load(group: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        collectives = model_shards.collectives_of(model)
        if collectives is not None and model_shards.shards_of(model):
            raise ValueError(
                "Partitioned tables cannot be read from a file in Keras's "
                f"legacy format. Received: '{group.file.filename}'. Load it "
                "in one process, save .weights.h5 there and load that."
            )
        return original(group, model, *args, **kwargs)

    setattr(module, name, load)


def _read_part_of_slots() -> None:
    """Lets optimizers read their part of the whole slots in a file."""
    original = keras.optimizers.Optimizer.load_own_variables

    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> None:
        shards = model_shards.only_shards(list(self.variables))
        assign = whole_tables.assign_part
        with model_shards.methods(shards, assign=assign):
            original(self, store)

    keras.optimizers.Optimizer.load_own_variables = load_own_variables


def _read_arrays() -> None:
    """Lets tf_keras divide what it reads: a summed variable's value.

    Its layers assign datasets of h5py, which know no division.
    """
    original = keras.layers.Layer.load_own_variables

    @functools.wraps(original)
    def load_own_variables(self: Any, store: Any) -> None:
        original(self, {name: store[name][()] for name in store})

    keras.layers.Layer.load_own_variables = load_own_variables
