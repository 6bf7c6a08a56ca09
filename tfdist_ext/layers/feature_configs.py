# SPDX-License-Identifier: Apache-2.0
"""The features and tables that a `DistributedEmbedding` is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.optimizers import table_optimizers
from tfdist_ext.tables import checks
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

Nest = Any


@dataclasses.dataclass(frozen=True)
class FeatureConfigs:
    """What the user asked for; an object that Keras does not look into."""

    nest: Nest
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    optimizers: dict[str, Any]

    @classmethod
    def of(cls, nest: Nest) -> FeatureConfigs:
        features = tuple(tf.nest.flatten(nest))
        for feature in features:
            if not isinstance(feature, FeatureConfig):
                raise ValueError(
                    "Argument `feature_configs` must be a nest of "
                    f"FeatureConfig. Received in it: {feature!r}."
                )
        if isinstance(nest, dict) and set(nest) == {"ids", "weights"}:
            raise ValueError(
                "Argument `feature_configs` must not be a dict of 'ids' and "
                "'weights' alone: such a dict is what `preprocess` makes of "
                "ids and their weights. Name one of them otherwise."
            )
        by_name: dict[str, TableConfig] = {}
        for feature in features:
            known = by_name.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise ValueError(
                    f"Two tables are named '{known.name}': {known} and "
                    f"{feature.table}. Give features that share a table the "
                    "same TableConfig, others another name."
                )
        checks.distinct("features", [feature.name for feature in features])
        # Made here: when Keras 3 builds a layer, it may not make variables.
        optimizers = {
            table.name: table_optimizers.as_row_optimizer(
                table.optimizer, table.name
            )
            for table in by_name.values()
            if table.optimizer is not None
        }
        return cls(nest, features, tuple(by_name.values()), optimizers)

    def batch_size(self, world_size: int) -> int | None:
        """Samples per rank, None if no feature tells."""
        batch = self.features[0].input_shape[0]
        return None if batch is None else -(-batch // world_size)

    def pack(self, flat: Sequence[Any]) -> Nest:
        """What there is of every feature, as the user's nest."""
        return tf.nest.pack_sequence_as(self.nest, flat)

    def flatten(self, values: Nest, argument: str, layer: str) -> list[Any]:
        """What there is of every feature, in order.

        Args:
            values: a nest like that of the features; lists and tuples are the
                same, since tuples come back from a file as lists.
            argument: its name, for errors.
            layer: name, for errors.

        Raises:
            ValueError: for another nest.
        """
        try:
            tf.nest.assert_same_structure(
                _with_lists(self.nest), _with_lists(values)
            )
        except (TypeError, ValueError) as error:
            names = self.pack([config.name for config in self.features])
            raise ValueError(
                f"Layer '{layer}': `{argument}` must have the nest of "
                f"`feature_configs`, {names}. Received: {values}."
            ) from error
        flat: list[Any] = tf.nest.flatten(values)
        return flat

    @property
    def dims(self) -> list[int]:
        """Width of every feature's result."""
        return [feature.table.embedding_dim for feature in self.features]

    def get_config(self) -> dict[str, Any]:
        """Tables, features and their nest, as JSON can hold them."""
        return {
            "tables": [table.get_config(_serialize) for table in self.tables],
            "features": [
                {**feature.get_config(), "table": feature.table.name}
                for feature in self.features
            ],
            "nest": self.pack(range(len(self.features))),
        }

    @staticmethod
    def nest_from_config(config: dict[str, Any]) -> Nest:
        """Takes what `get_config` wrote out of `config`; the user's nest."""
        read = [
            TableConfig.from_config(table, _deserialize)
            for table in config.pop("tables")
        ]
        if "feature_configs" in config:  # of keras-rs
            return _nest_of_keras_rs(config.pop("feature_configs"), read)
        by_name = {table.name: table for table in read}
        features = [
            FeatureConfig.from_config(
                {**feature, "table": by_name[feature["table"]]}
            )
            for feature in config.pop("features")
        ]
        return tf.nest.map_structure(
            lambda index: features[index], config.pop("nest")
        )


def _nest_of_keras_rs(nest: Nest, read: Sequence[TableConfig]) -> Nest:
    """A nest of feature configs, whose tables are numbers."""
    if isinstance(nest, list | tuple):
        return type(nest)(_nest_of_keras_rs(value, read) for value in nest)
    if isinstance(nest.get("name"), str):
        return FeatureConfig.from_config({**nest, "table": read[nest["table"]]})
    return {key: _nest_of_keras_rs(value, read) for key, value in nest.items()}


def _serialize(value: Any) -> Any:
    """Serializes like Keras; what came from a config is a dict already."""
    if isinstance(value, dict):
        return value
    return tf.keras.utils.serialize_keras_object(value)


def _deserialize(value: Any) -> Any:
    # Names stay as they are: what they mean depends on the argument.
    if isinstance(value, dict):
        return tf.keras.utils.deserialize_keras_object(value)
    return value


def _with_lists(nest: Nest) -> Nest:
    if isinstance(nest, dict):
        return {key: _with_lists(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return [_with_lists(value) for value in nest]
    return nest
