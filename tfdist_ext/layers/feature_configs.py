# SPDX-License-Identifier: Apache-2.0
"""The features and tables that a `DistributedEmbedding` is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.embedding.key_shard import KeyShard
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.layers.sparse_layer import SparseLayer
from tfdist_ext.optimizers import rules
from tfdist_ext.tables import checks
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

Nest = Any


@dataclasses.dataclass(frozen=True)
class _Value:
    """The ids of a feature.

    Attributes:
        name: of layer and feature, for errors.
        ids: of the feature, cut to the length of its sequences.
        length: that length, `[m]`.
        kept: whether the row of every id is kept.
        texts: whether ids are strings.
    """

    name: str
    ids: Any
    length: sparse_inputs.Sizes
    kept: bool
    texts: bool

    def weights(self, weights: Any) -> Any:
        """The weights of the ids, None if they have none."""
        if weights is None or not self.kept:
            return weights
        return sparse_inputs.of_length(weights, self.length, self.name)


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
            table.name: rules.as_row_optimizer(table.optimizer, table.name)
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

    def _values(self, inputs: Nest, layer: str) -> list[_Value]:
        """Every feature with its ids."""
        found = []
        for ids, config in zip(
            self.flatten(inputs, "inputs", layer), self.features, strict=True
        ):
            name = f"{layer}/{config.name}"
            length = config.output_shape[1:-1]
            vocabulary = config.table.vocabulary
            texts = vocabulary is not None and vocabulary.key_dtype == "string"
            if config.table.combiner is None:
                ids = sparse_inputs.of_length(ids, length, name)
                found.append(_Value(name, ids, length, True, texts))
            else:
                rows = config.table.vocabulary_size
                sparse_inputs.refuse_matrix(ids, rows, layer)
                found.append(_Value(name, ids, (), False, texts))
        return found

    def ids(self, inputs: Nest, weights: Nest, layer: str) -> list[list[Ids]]:
        """The lists of every feature, one for each.

        Args:
            inputs: nest of ids.
            weights: a nest like it, or None.
            layer: name, for errors.

        Raises:
            ValueError: for ids or weights of another kind, or another nest.
        """
        given = [None] * len(self.features)
        if weights is not None:
            given = self.flatten(weights, "weights", layer)
        return [
            [sparse_inputs.ids_of(v.ids, v.weights(w), v.name, v.kept, v.texts)]
            for v, w in zip(self._values(inputs, layer), given, strict=True)
        ]

    def layouts(self, inputs: Nest, layer: str) -> list[Layout]:
        """How the results of every feature lie, see `ids`."""
        return [
            sparse_inputs.layout_of(v.ids, v.kept, v.name, v.length)
            for v in self._values(inputs, layer)
        ]

    def zeros(self, inputs: Nest, layer: str, bundled: bool) -> Nest:
        """Results of zeros, for a model that is built by its shapes.

        Args:
            inputs: nest of ids; or of what `preprocess` makes, of which Keras
                shows one tensor.
            layer: name, for errors.
            bundled: whether it is that.
        """
        if bundled:
            first = tf.shape(tf.nest.flatten(inputs)[0])
            return self.pack(
                [
                    tf.zeros([first[0], *(1 if s is None else s for s in rest)])
                    for _, *rest in self.output_shapes
                ]
            )
        return self.pack(
            [
                id_layout.zeros(each, dim)
                for each, dim in zip(
                    self.layouts(inputs, layer), self.dims, strict=True
                )
            ]
        )

    @property
    def dims(self) -> list[int]:
        """Width of every feature's result."""
        return [feature.table.embedding_dim for feature in self.features]

    @property
    def output_shapes(self) -> list[tuple[int | None, ...]]:
        """Shape of every feature's result, but the batch, which is a rank's."""
        return [
            (
                None,
                *feature.output_shape[1:-1],
                feature.table.embedding_dim,
            )
            for feature in self.features
        ]

    def symbolic(
        self, inputs: Nest
    ) -> list[tuple[tuple[int | None, ...], bool]]:
        """Shapes of the results, and whether they are ragged (Keras 3).

        Args:
            inputs: symbolic ids, or what Keras shows of a bundle of them.
        """
        flat = tf.nest.flatten(inputs)
        found = []
        for index, (_, *rest) in enumerate(self.output_shapes):
            sizes, ragged = rest[:-1], False
            if len(flat) == len(self.features) and sizes:
                ids = flat[index]
                ragged = getattr(ids, "ragged", False) and not any(sizes)
                pairs = zip(sizes, ids.shape[1:], strict=False)
                sizes = [size or given for size, given in pairs]
            found.append(((flat[0].shape[0], *sizes, rest[-1]), ragged))
        return found

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


class DynamicTables(SparseLayer):
    """Base of layers some of whose tables may have a `DynamicVocabulary`.

    Args:
        **kwargs: of a `SparseLayer`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._keys: dict[str, KeyShard] = {}

    def _refuse_prefetched_keys(self, tables: Sequence[TableConfig]) -> None:
        growing = [table.name for table in tables if table.vocabulary]
        if self.prefetch_ids and growing:
            raise ValueError(
                f"Layer '{self.name}': prefetch_ids=True asks for rows a step "
                "ahead, which a vocabulary that grows may give to other keys "
                f"meanwhile. Leave it out, or put the tables {growing} into a "
                "layer of their own."
            )

    def _add_keys(
        self,
        tables: Sequence[TableConfig],
        specs: Sequence[ShardSpec],
        initializers: Sequence[Any],
    ) -> None:
        """Makes this rank's part of every vocabulary that grows."""
        for table, spec, initializer in zip(
            tables, specs, initializers, strict=True
        ):
            if table.vocabulary is not None:
                keys = KeyShard(
                    spec,
                    table.vocabulary,
                    initializer,
                    self._collectives,
                    order=len(self._keys),
                )
                self._keys[table.name] = keys
                setattr(self, f"keys_{table.name}", keys)

    def get_vocabularies(self) -> dict[str, dict[str, np.ndarray]]:
        """The keys of vocabularies that grow; under a strategy all ranks call.

        Returns:
            For every table with a `DynamicVocabulary`, by name: "keys" int64
            `[n]`, or fingerprints int64 `[n, 2]` of strings, with their
            "rows", "counts" and "steps" (when each was last seen), int64
            `[n]`, by row; with `keep_text` also "texts", bytes `[n]`.
        """
        return {name: keys.all_keys() for name, keys in self._keys.items()}

    def vocabulary_counts(self) -> dict[str, dict[str, int]]:
        """How full vocabularies are; under a strategy all ranks call.

        Returns:
            For every table with a `DynamicVocabulary`, by name: "capacity",
            "rows" in use, "candidates" not yet admitted, and since the start
            keys "admitted", "evicted" and "expired"; "step", the steps
            learned from.
        """
        return {
            name: {"capacity": keys.config.capacity, **keys.counts()}
            for name, keys in self._keys.items()
        }

    def save_own_variables(self, store: Any) -> None:
        """Writes tables whole, with their keys; all ranks call."""
        super().save_own_variables(store)
        for name, keys in self._keys.items():
            for what, array in keys.gathered().items():
                store[_entry(name, what)] = array

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of every table, and its keys."""
        super().load_own_variables(store)
        for name, keys in self._keys.items():
            start = _entry(name, "")
            keys.take(
                {
                    each.removeprefix(start): store[each]
                    for each in store.keys()  # noqa: SIM118 (not a dict)
                    if each.startswith(start)
                }
            )


def _entry(table: str, what: str) -> str:
    """The name of an array in a file of Keras."""
    return f"keys of {table}: {what}"
