# SPDX-License-Identifier: Apache-2.0
"""Tables as weights of a Keras layer: made, saved and loaded in parts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.output_dist import Wire
from tfdist_ext.embedding.pooled_lookup import Ahead
from tfdist_ext.optimizers import table_optimizers
from tfdist_ext.optimizers.keras_versions import KERAS_3
from tfdist_ext.prefetch import prefetched_ids
from tfdist_ext.sharding import initial_rows
from tfdist_ext.sharding import sharded_variable
from tfdist_ext.sharding import whole_tables
from tfdist_ext.tables.shard_spec import ShardSpec

WIRE_DTYPES = ("float32", "bfloat16", "float16")
ROUNDINGS = ("nearest", "stochastic")

# For `add_weight`: tf_keras would round a weight to the compute dtype of a
# mixed policy wherever it is read.
KEEP_DTYPE = {} if KERAS_3 else {"experimental_autocast": False}


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses an argument that is not one of some choices."""
    if value not in choices:
        raise ValueError(
            f"Argument `{name}` must be one of {choices}. Received: "
            f"{name}={value!r}."
        )


def wire_of(layer: Any) -> Wire:
    """How the results of a layer travel, as its arguments say."""
    return Wire(
        layer.name,
        tf.as_dtype(layer.wire_dtype),
        layer.wire_packing,
        layer.wire_rounding,
    )


def prefetched(
    layer: Any, inputs: Any
) -> tuple[list[list[Ids]], Ahead | None] | None:
    """Ids from the input pipeline, and those of the next batch if known.

    Args:
        layer: that is called.
        inputs: of it; None is returned unless its `preprocess` made them.
    """
    if not prefetched_ids.is_prefetched(inputs):
        return None
    ahead = None
    if inputs.ahead and layer._collectives is not None:
        following = prefetched_ids.of_features(inputs.ahead[0], inputs.counts)
        place = layer._collectives.place_of(layer)
        ahead = Ahead(following, inputs.position, f"{place}/{inputs.which}")
    return prefetched_ids.of_features(inputs.now, inputs.counts), ahead


def rank_and_world_size(collectives: Collectives | None) -> tuple[int, int]:
    """Of the strategy; rank 0 of 1 without one."""
    if collectives is None:
        return 0, 1
    return collectives.group.rank, collectives.group.world_size


def agree(features: Sequence[Feature], collectives: Collectives | None) -> None:
    """Compares where the ranks have the tables of a layer; all must call.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if one has a table
            otherwise, other hot ids or another layer.
    """
    if collectives is None:
        return
    with tf.init_scope():
        collectives.group.check_plan(
            [
                f"'{feature.name}' in {feature.spec}"
                + ", deduplicated" * feature.deduplicate
                for feature in features
            ]
        )


def add_table(
    layer: Any,
    name: str,
    spec: ShardSpec,
    initializer: Any,
    optimizer: Any = None,
    **kwargs: Any,
) -> Any:
    """Adds the weight that holds this rank's part of a table.

    Args:
        layer: the Keras layer.
        name: of the weight.
        spec: which part.
        initializer: of Keras, for the whole table.
        optimizer: for this table alone, None to leave it to the model's.
        **kwargs: for `add_weight`.
    """
    with sharded_variable.creating(spec):
        variable = layer.add_weight(
            name=name,
            shape=spec.local_shape,
            initializer=initial_rows.for_shard(
                initializer, spec, layer._collectives
            ),
            **{"dtype": "float32", **kwargs},
        )

    def made() -> None:
        whole_tables.accept_whole(variable)
        if optimizer is not None:
            table_optimizers.attach(variable, optimizer)

    if getattr(variable, "_value", variable) is not None:
        made()
        return variable
    # Keras 3 builds some models in a scope where no variable may be made, and
    # makes them afterwards.
    make = variable._deferred_initialize

    def make_part() -> None:
        with sharded_variable.creating(spec):
            make()
        made()

    variable._deferred_initialize = make_part
    return variable


def to_save(variable: Any, collectives: Collectives | None) -> Any:
    """The whole table on rank 0, which writes the file; all ranks call."""
    if collectives and sharded_variable.is_shard(variable):
        return whole_tables.gather_to_first(variable, collectives)
    return variable


def load(variable: Any, whole: Any) -> None:
    """Assigns this rank's part of a whole table."""
    if sharded_variable.is_shard(variable):
        whole_tables.assign_part(variable, whole)
    else:
        variable.assign(whole)


def whole(
    variables: Mapping[str, Any],
    collectives: Collectives | None,
    folder: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """See `DistributedEmbedding.get_embedding_tables`."""
    if folder is None:
        return {
            name: tf.constant(whole_tables.gather(variable, collectives))
            for name, variable in variables.items()
        }
    paths = {name: os.path.join(folder, f"{name}.npy") for name in variables}
    if collectives is None or collectives.group.rank == 0:
        os.makedirs(folder, exist_ok=True)
    for name, variable in variables.items():
        whole_tables.write(variable, collectives, paths[name])
    return paths


def set_whole(
    layer: str, variables: Mapping[str, Any], values: Mapping[str, Any]
) -> None:
    """See `DistributedEmbedding.set_embedding_tables`."""
    if set(values) - set(variables):
        raise ValueError(
            f"Layer '{layer}' has the tables {sorted(variables)}. Received: "
            f"{sorted(values)}."
        )
    for name, value in values.items():
        variables[name].assign(value)


def is_symbolic_build() -> bool:
    """Whether Keras 3 builds a model, in a graph that is never run.

    It does so under a strategy, with dense placeholders even for sparse
    inputs.
    """
    graph = tf.compat.v1.get_default_graph()
    return str(getattr(graph, "name", "")).startswith("scratch_graph")
