# SPDX-License-Identifier: Apache-2.0
"""SavedModels of several ranks: written once, refused with tables.

A rank's trace of a partitioned model exchanges ids with its peers and knows
the shard's rows only: nothing but those ranks could run it.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any
from typing import NoReturn

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import part_of_index
from tfdist_ext.marks import shard_spec
from tfdist_ext.saving.write_once import write_once


def refuse_for_lite(original: Any, model: Any) -> Any:
    """TFLite takes no tables of which this rank has a part."""
    for variable in model.variables:
        if shard_spec(variable) is not None:
            refuse(variable, "for TFLite")
    return original(model)


def save_once(
    original: Any, obj: Any, export_dir: Any, *args: Any, **kwargs: Any
) -> Any:
    found = list(tf.train.TrackableView(obj).descendants())
    for trackable in found:
        if shard_spec(trackable) is not None:
            refuse(trackable, f"to '{export_dir}'")
        if index := part_of_index(trackable):
            raise ValueError(
                f"Index '{index}' cannot be exported to '{export_dir}' by "
                "several ranks, each of which has a part of the candidates. "
                "Use tfdist_ext.export, of the index by itself or of a Keras "
                "model with it: see 'Serving an index' in docs/retrieval.md."
            )
    strategies = {_strategy_of(trackable) for trackable in found}
    for strategy in strategies:
        collectives = getattr(strategy, "collectives", None)
        if collectives is not None:
            return write_once(
                collectives,
                export_dir,
                lambda path: original(obj, path, *args, **kwargs),
                make_folder=True,
                stays=is_first_with(export_dir, collectives),
            )
    return original(obj, export_dir, *args, **kwargs)


def is_first_with(path: Any, collectives: Collectives) -> bool:
    """Whether no rank before this one was given the path.

    All ranks have all of a model without tables. Some callers read what they
    wrote, each from a path of its own (the TFLite converter).
    """
    if not isinstance(path, str | os.PathLike):  # of this process alone
        return collectives.group.rank == 0
    absolute = os.path.abspath(path).encode()
    digest = hashlib.blake2b(absolute, digest_size=7).digest()
    own = int.from_bytes(digest, "little")
    digests = collectives.all_gather(
        tf.constant([own], tf.int64), "export/path"
    ).numpy()
    return int(np.argmax(digests == own)) == collectives.group.rank


def _strategy_of(trackable: Any) -> Any:
    value = value_of(trackable)
    if isinstance(value, internals.DistributedValues):
        return value._distribute_strategy
    return None


def refuse(shard: Any, where: str) -> NoReturn:
    """Says that a model with this shard cannot be exported, and what to do."""
    spec = shard_spec(shard)
    assert spec is not None
    raise ValueError(
        f"A model with partitioned tables cannot be exported {where} by "
        f"{spec.world_size} ranks. Received: table '{spec.table}'. Call "
        "tfdist_ext.export(model, path), on all ranks: it writes a SavedModel "
        "of TensorFlow's own ops, which others convert. See docs/serving.md."
    )
