# SPDX-License-Identifier: Apache-2.0
"""What the layers share: tables in parts, one lookup, one way to travel."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.batches.ids import Ids
from tfdist_ext.batches.outline import Outline
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import capture
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.pooled_lookup import pooled_lookup
from tfdist_ext.embedding.wire import Wire
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.optimizers import row_norms
from tfdist_ext.optimizers import table_optimizers
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.prefetch import prefetched_ids
from tfdist_ext.sharding import initial_rows
from tfdist_ext.sharding import sharded_variable
from tfdist_ext.sharding import whole_tables
from tfdist_ext.tables.shard_spec import ShardSpec

keras = tf.keras

# For `add_weight`: tf_keras would round a weight to the compute dtype of a
# mixed policy wherever it is read.
KEEP_DTYPE = {} if KERAS_3 else {"experimental_autocast": False}


def _field_of_wire(field: str) -> Any:
    return property(lambda layer: getattr(layer.wire, field))


class SparseLayer(keras.layers.Layer):  # type: ignore[name-defined]
    """Base of layers whose weights are partitioned over the ranks.

    A subclass sets `_collectives` and `_features` when it is built, and says
    what the ids of its inputs are (`_ids`) and which variables they are
    looked up in (`table_variables`).

    Args:
        wire: how ids and numbers travel.
        prefetch_ids: whether `preprocess` makes inputs whose ids are
            exchanged a step ahead.
        **kwargs: of a Keras layer.
    """

    # `keras_training.shared_exchanges` counts such layers of a model.
    looks_up_tables = True
    _features: Sequence[Feature]

    def __init__(
        self, *, wire: Wire, prefetch_ids: bool = False, **kwargs: Any
    ) -> None:
        # Ids must not be cast, and tables have a dtype of their own.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.wire = dataclasses.replace(wire, label=self.name)
        self.prefetch_ids = prefetch_ids
        self._collectives: Collectives | None = None
        self.supports_jit = False
        hold(Need.TABLES, self)

    wire_dtype = _field_of_wire("dtype")
    wire_rounding = _field_of_wire("rounding")
    wire_packing = _field_of_wire("packed")

    def _ids(self, *inputs: Any) -> list[list[Ids]]:
        """Lists of ids whose results are summed, for every feature."""
        raise NotImplementedError(type(self).__name__)

    def _outlines(self, inputs: Any) -> Sequence[Outline]:
        """How the results of every feature lie.

        Args:
            inputs: as for `_ids`, or what `preprocess` made.
        """
        raise NotImplementedError(type(self).__name__)

    def table_variables(self) -> list[Any]:
        """This rank's part of each table, by its number in the features."""
        raise NotImplementedError(type(self).__name__)

    def _own_variables(self) -> Mapping[str, Any]:
        """What files hold of this layer alone, by name."""
        return {}

    def _look_up(self, *inputs: Any, learn: bool = False) -> list[tf.Tensor]:
        """Pooled rows of every feature, float32 `[batch, dim]`.

        Args:
            *inputs: for `_ids`, or the one that `preprocess` made.
            learn: see `pooled_lookup`.
        """
        place = None if self._collectives is None else self._place_ahead
        given = prefetched_ids.for_call(inputs[0], place)
        if given is None:
            known = capture.known_answer(self._features)
            if known is not None:
                return known
            given = self._ids(*inputs), None
        ids, ahead = given
        return pooled_lookup(
            ids,
            self._features,
            self._made_tables(),
            self._collectives,
            self.wire,
            ahead,
            learn,
        )

    def _made_tables(self) -> list[Any]:
        tables = self.table_variables()
        if any(keras_internals.value_of(table) is None for table in tables):
            raise ValueError(
                f"Layer '{self.name}' is first called in a tf.function of "
                "yours while Keras builds the model, where variables cannot be "
                "made. Call or build it before: "
                "`with strategy.scope(): layer.build(input_shape)`."
            )
        return tables

    def _place_ahead(self) -> str:
        assert self._collectives is not None
        return self._collectives.place_of(self)

    def preprocess(self, inputs: Any) -> Any:
        """Prepares inputs in the input pipeline.

        To be mapped over a dataset. With `prefetch_ids=True` every step then
        exchanges the ids of the next batch, see
        `DistributedEmbedding.preprocess`; otherwise nothing is changed.

        Args:
            inputs: see the class.

        Returns:
            What the layer takes as its input.
        """
        if self.prefetch_ids:
            return prefetched_ids.bundle(
                self._ids(inputs), self._outlines(inputs)
            )
        return inputs

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Those of the strategy; rank 0 of 1 without one."""
        if self._collectives is None:
            return 0, 1
        return self._collectives.group.rank, self._collectives.group.world_size

    def _agree(self, features: Sequence[Feature]) -> None:
        """Compares where the ranks have the tables; all must call.

        Raises:
            tf.errors.InvalidArgumentError: on every rank, if one has a table
                otherwise, or another layer.
        """
        if self._collectives is None:
            return
        with tf.init_scope():
            self._collectives.group.check_same(
                [
                    f"'{feature.name}' in {feature.spec}"
                    + ", unique rows" * feature.unique
                    for feature in features
                ]
            )

    def _add_table(
        self,
        name: str,
        spec: ShardSpec,
        initializer: Any,
        optimizer: Any = None,
        keys: Any = None,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds the weight that holds this rank's part of a table.

        Args:
            name: of the weight.
            spec: which part.
            initializer: of Keras, for the whole table.
            optimizer: for this table alone, None to leave it to the model's.
            keys: `KeyShard` of a table whose vocabulary grows, else None.
            max_norm: the longest that a row may be.
            **kwargs: for `add_weight`.
        """
        with sharded_variable.creating(spec):
            variable = self.add_weight(
                name=name,
                shape=spec.local_shape,
                initializer=initial_rows.for_shard(
                    initializer, spec, self._collectives
                ),
                **{"dtype": "float32", **KEEP_DTYPE, **kwargs},
            )

        def made() -> None:
            whole_tables.accept_whole(variable)
            if keys is not None:
                keys.attach(keras_internals.value_of(variable))
            if optimizer is not None:
                table_optimizers.attach(variable, optimizer)
            if max_norm is not None:
                row_norms.limit(variable, max_norm)

        keras_internals.when_made(
            variable, lambda: sharded_variable.creating(spec), made
        )
        return variable

    def save_own_variables(self, store: Any) -> None:
        """Writes tables whole; all ranks call, rank 0's file stays."""
        if not self.built:
            return
        for name, variable in self._own_variables().items():
            value = variable
            if self._collectives and sharded_variable.is_shard(variable):
                value = whole_tables.gather_to_first(
                    variable, self._collectives
                )
            store[name] = value  # once: a file refuses a second value

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of every table."""
        for name, variable in self._own_variables().items():
            if sharded_variable.is_shard(variable):
                whole_tables.assign_part(variable, store[name])
            else:
                variable.assign(store[name])

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the weights in order, tables whole or as this rank's part.

        Args:
            weights: anything that can be sliced, a memory map for example.
        """
        whole_tables.set_weights(self, weights)

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config: dict[str, Any] = super().get_config()
        config["prefetch_ids"] = self.prefetch_ids
        return config
