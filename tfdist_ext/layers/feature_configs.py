# SPDX-License-Identifier: Apache-2.0
"""The features and tables that a `DistributedEmbedding` is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.optimizers import table_optimizers
from tfdist_ext.sharding.tables import FeatureConfig
from tfdist_ext.sharding.tables import TableConfig

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
        by_name: dict[str, TableConfig] = {}
        for feature in features:
            known = by_name.setdefault(feature.table.name, feature.table)
            if known != feature.table:
                raise ValueError(
                    f"Two tables are named '{known.name}': {known} and "
                    f"{feature.table}. Give features that share a table the "
                    "same TableConfig, others another name."
                )
        _require_unique([feature.name for feature in features])
        # Made here: when Keras 3 builds a layer, it may not make variables.
        optimizers = {
            table.name: table_optimizers.as_row_optimizer(
                table.optimizer, table.name
            )
            for table in by_name.values()
            if table.optimizer is not None
        }
        return cls(nest, features, tuple(by_name.values()), optimizers)


def _require_unique(names: Sequence[str]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    if repeated:
        raise ValueError(
            "Features must have different names. Received more than once: "
            f"{sorted(repeated)}."
        )
