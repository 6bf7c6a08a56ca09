# SPDX-License-Identifier: Apache-2.0
"""Features and tables of a `DistributedEmbedding`, as its user configures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Nested
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Store
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike


@dataclasses.dataclass(frozen=True)
class _Value:
    """The ids of a feature.

    Attributes:
        name: the names of layer and feature, for errors.
        ids: the ids, cut to the length of the feature's sequences.
        length: sizes of the sequences, without batch and columns.
        unpooled: whether the result has the row of every id.
        texts: whether ids are strings.
    """

    name: str
    ids: TensorLike
    length: sparse_inputs.Sizes
    unpooled: bool
    texts: bool

    def weights(self, weights: TensorLike) -> TensorLike:
        """Returns the weights cut to the length of the ids, or None."""
        if weights is None or not self.unpooled:
            return weights
        return sparse_inputs.of_length(weights, self.length, self.name)


@dataclasses.dataclass(frozen=True)
class FeatureConfigs:
    """A layer's feature configs, in an object that Keras does not track."""

    nest: Nested[FeatureConfig]
    features: tuple[FeatureConfig, ...]
    tables: tuple[TableConfig, ...]
    optimizers: Mapping[str, Optimizer]

    @classmethod
    def of(cls, nest: Nested[FeatureConfig]) -> FeatureConfigs:
        features = tuple(tf.nest.flatten(nest))
        for feature in features:
            if not isinstance(feature, FeatureConfig):
                raise ValueError(
                    "Argument `feature_configs` must be a nest of "
                    f"FeatureConfig. Received in it: {feature!r}."
                )
        if isinstance(nest, dict) and set(nest) == {"ids", "weights"}:
            raise ValueError(
                "Argument `feature_configs` must not be a dict with only "
                "'ids' and 'weights': `preprocess` returns such a dict for "
                "ids with weights. Rename one of them."
            )
        by_name: dict[str, TableConfig] = {}
        for feature in features:
            known = by_name.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise ValueError(
                    f"Two tables are named '{known.name}': {known} and "
                    f"{feature.table}. Give features that share a table the "
                    "same TableConfig, and other tables other names."
                )
        checks.distinct("features", [feature.name for feature in features])
        # Created here, because Keras 3 forbids new variables in `build`.
        optimizers = {
            table.name: rules.as_row_optimizer(table.optimizer, table.name)
            for table in by_name.values()
            if table.optimizer is not None
        }
        return cls(nest, features, tuple(by_name.values()), optimizers)

    def batch_size(self, world_size: int) -> int | None:
        """Returns samples per rank, or None if the config does not say."""
        batch = self.features[0].input_shape[0]
        return None if batch is None else -(-batch // world_size)

    def pack(self, flat: Sequence[T]) -> Nest:
        """Packs one value per feature into the user's nest."""
        return tf.nest.pack_sequence_as(self.nest, flat)

    def flatten(
        self, values: Nest, argument: str, layer: str
    ) -> list[TensorLike]:
        """Returns one value per feature, in the order of the features.

        Args:
            values: a nest with the structure of the features. Lists and tuples
                are equivalent, because a file restores tuples as lists.
            argument: the name of the argument, for errors.
            layer: the layer's name, for errors.

        Raises:
            ValueError: if the nest has another structure.
        """
        try:
            tf.nest.assert_same_structure(
                _with_lists(self.nest), _with_lists(values)
            )
        except (TypeError, ValueError) as error:
            names = self.pack([config.name for config in self.features])
            raise ValueError(
                f"Layer '{layer}': `{argument}` must have the structure of "
                f"`feature_configs`, {names}. Received: {values}."
            ) from error
        flat: list[TensorLike] = tf.nest.flatten(values)
        return flat

    def _values(self, inputs: Nest, layer: str) -> list[_Value]:
        """Returns the ids of every feature."""
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
        """Returns the ids of every feature in CSR format, in a list of one.

        Args:
            inputs: nest of ids.
            weights: a nest of weights with the same structure, or None.
            layer: the layer's name, for errors.

        Raises:
            ValueError: if the type of ids or weights is not supported, or the
                nest has another structure.
        """
        given = [None] * len(self.features)
        if weights is not None:
            given = self.flatten(weights, "weights", layer)
        return [
            [
                sparse_inputs.ids_of(
                    v.ids, v.weights(w), v.name, v.unpooled, v.texts
                )
            ]
            for v, w in zip(self._values(inputs, layer), given, strict=True)
        ]

    def layouts(self, inputs: Nest, layer: str) -> list[Layout]:
        """Returns the layout of every feature's results, see `ids`."""
        return [
            sparse_inputs.layout_of(v.ids, v.unpooled, v.name, v.length)
            for v in self._values(inputs, layer)
        ]

    def zeros(self, inputs: Nest, layer: str, bundled: bool) -> Nest:
        """Returns zeros as results, while Keras builds a model from shapes.

        Args:
            inputs: nest of ids, or the one tensor that Keras passes for the
                result of `preprocess`.
            layer: the layer's name, for errors.
            bundled: whether `inputs` stands for the result of `preprocess`.
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
        """The width of every feature's result."""
        return [feature.table.embedding_dim for feature in self.features]

    @property
    def output_shapes(self) -> list[tuple[int | None, ...]]:
        """The shape of every feature's result; the batch dimension is None."""
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
        """Returns shapes of the results, and whether they are ragged (Keras 3).

        Args:
            inputs: symbolic ids, or Keras's symbolic result of `preprocess`.
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

    def get_config(self) -> Config:
        """Returns tables, features and their nest, in types of JSON."""
        return {
            "tables": [table.get_config(_serialize) for table in self.tables],
            "features": [
                {**feature.get_config(), "table": feature.table.name}
                for feature in self.features
            ],
            "nest": self.pack(range(len(self.features))),
        }

    @staticmethod
    def nest_from_config(config: Config) -> Nested[FeatureConfig]:
        """Removes what `get_config` wrote from `config`; returns the nest."""
        read = [
            TableConfig.from_config(table, _deserialize)
            for table in config.pop("tables")
        ]
        if "feature_configs" in config:  # a config of keras-rs
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


def _nest_of_keras_rs(
    nest: Any, read: Sequence[TableConfig]
) -> Nested[FeatureConfig]:
    """Returns a nest of feature configs from one with indices of tables."""
    if isinstance(nest, list | tuple):
        return type(nest)(_nest_of_keras_rs(value, read) for value in nest)
    if isinstance(nest.get("name"), str):
        return FeatureConfig.from_config({**nest, "table": read[nest["table"]]})
    return {key: _nest_of_keras_rs(value, read) for key, value in nest.items()}


def _serialize(value: object) -> object:
    """Serializes as Keras does; a dict is already serialized."""
    if isinstance(value, dict):
        return value
    return tf.keras.utils.serialize_keras_object(value)


def _deserialize(value: object) -> object:
    # Strings stay as they are: their meaning depends on the argument.
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
    """Base class of layers whose tables may have a `DynamicVocabulary`.

    Args:
        **kwargs: arguments of a `SparseLayer`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._keys: dict[str, KeyShard] = {}

    def _add_keys(
        self,
        tables: Sequence[TableConfig],
        specs: Sequence[ShardSpec],
        initializers: Sequence[InitializerLike],
    ) -> None:
        """Creates this rank's part of every dynamic vocabulary."""
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
        """Returns the keys of dynamic vocabularies; a joint call of all ranks.

        Returns:
            A dict by the name of the table, of dicts with these arrays, sorted
            by row: "keys", int64 `[n]`, or int64 `[n, 2]` fingerprints of
            strings; "rows", "counts" and "steps" (when each key was last
            seen), int64 `[n]`; and, with `keep_text`, "texts", bytes `[n]`.
        """
        return {name: keys.all_keys() for name, keys in self._keys.items()}

    def vocabulary_counts(self) -> dict[str, dict[str, int]]:
        """Returns counts of dynamic vocabularies; a joint call of all ranks.

        Returns:
            A dict by the name of the table, of dicts with these numbers:
            "capacity"; "rows" in use; "candidates" that are not yet admitted;
            keys "admitted", "evicted" and "expired" since the start; and
            "step", the number of steps that were learned from.
        """
        return {
            name: {"capacity": keys.config.capacity, **keys.counts()}
            for name, keys in self._keys.items()
        }

    def save_own_variables(self, store: Store) -> None:
        """Writes entire tables and their keys; a joint call of all ranks.

        Args:
            store: Keras's store of the file, a dict of arrays by name.
        """
        super().save_own_variables(store)
        for name, keys in self._keys.items():
            for what, array in keys.gathered().items():
                store[_entry(name, what)] = array

    def load_own_variables(self, store: Store) -> None:
        """Reads this rank's part of every table, and its keys.

        Args:
            store: Keras's store of the file, a dict of arrays by name.
        """
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
    """Returns the name of an array in a Keras file."""
    return f"keys of {table}: {what}"
