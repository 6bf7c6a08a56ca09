# SPDX-License-Identifier: Apache-2.0
"""Reduces configurations of tables and features to the numbers of a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.planner import popularity as popularity_lib
from tfdist_ext.planner.problem import FeatureNumbers
from tfdist_ext.planner.problem import Problem
from tfdist_ext.planner.problem import Setting
from tfdist_ext.planner.problem import TableNumbers
from tfdist_ext.tables import checks
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

# What is assumed when the input does not tell how many ids a sample has.
USUAL_HOTNESS = 100.0

# (Numbers per weight, numbers per row) that an optimizer keeps.
_SLOTS = {
    "sgd": (0.0, 0.0),
    "momentum": (1.0, 0.0),
    "adagrad": (1.0, 0.0),
    "rowwiseadagrad": (0.0, 1.0),
    "adam": (2.0, 0.0),
    "lazyadam": (2.0, 0.0),
    "ftrl": (2.0, 0.0),
}


def hotness(input_shape: Any, input_dim: int) -> int | None:
    """Ids per sample, read off the shape of an input of ids.

    Args:
        input_shape: shape of the input, or a list or dict of shapes; None
            if nothing is known.
        input_dim: rows of the table; a last dimension of this size is a
            SparseTensor's and tells nothing.

    Returns:
        Ids per sample, None if unknown.
    """
    if isinstance(input_shape, Mapping):
        input_shape = list(input_shape.values())
    rank = getattr(input_shape, "rank", 0)  # None of an unknown TensorShape
    if input_shape is None or rank is None:
        return None
    shape = list(input_shape)
    if not shape:
        return None
    if hasattr(shape[0], "__iter__"):  # or a TensorShape
        known = [hotness(part, input_dim) for part in shape]
        return None if None in known else sum(k for k in known if k)
    if len(shape) == 1:
        return 1
    return None if shape[-1] == input_dim else shape[-1]


def make_problem(
    tables: Sequence[TableConfig],
    features: Sequence[FeatureConfig],
    setting: Setting,
    slots: float | str,
    popularity: float | Mapping[str, float],
    forced: Mapping[str, TablePlacement | str],
) -> Problem:
    """Reduces configurations to numbers; see `plan.plan` for the arguments.

    Raises:
        ValueError: if they contradict each other.
    """
    if not isinstance(slots, str) and not 0 <= slots < math.inf:
        raise ValueError(
            "Argument `slots_per_weight` must be an optimizer's name or a "
            f"number of at least 0. Received: slots_per_weight={slots!r}."
        )
    names = [table.name for table in tables]
    checks.distinct("tables", names)
    checks.distinct("features", [feature.name for feature in features])
    for name in forced:
        if name not in names:
            raise ValueError(
                f"Argument `forced` names no table of the plan: {name!r}. "
                f"Tables: {checks.listed(names)}."
            )
    positions = {name: i for i, name in enumerate(names)}
    for feature in features:
        index = positions.get(feature.table.name)
        if index is None or tables[index] != feature.table:
            raise ValueError(
                f"Feature {feature.name!r} looks up in a table that is not "
                f"in `tables`: {feature.table}."
            )
    indices = [positions[feature.table.name] for feature in features]
    ids = [_ids_of_sample(feature) for feature in features]
    lists = [
        _lists_of_sample(feature, z)
        for feature, z in zip(features, ids, strict=True)
    ]
    exponents = _exponents(features, ids, setting.batch_size, popularity)
    return Problem(
        tuple(_table(table, slots, forced) for table in tables),
        tuple(
            FeatureNumbers(feature.name, index, z / n, s, n)
            for feature, index, z, s, n in zip(
                features, indices, ids, exponents, lists, strict=True
            )
        ),
        setting,
    )


def _table(
    table: TableConfig,
    slots: float | str,
    forced: Mapping[str, TablePlacement | str],
) -> TableNumbers:
    placement = forced.get(table.name, table.placement)
    per_weight, per_row = _slots_of(table.optimizer, slots)
    return TableNumbers(
        name=table.name,
        rows=table.vocabulary_size,
        dim=table.embedding_dim,
        weight_bytes=4 if table.dtype == "float32" else 2,
        slots_per_weight=per_weight,
        slots_per_row=per_row,
        placement=placement,
        deduplicate=table.deduplicate,
        storage=table.storage,
    )


def _slots_of(optimizer: Any, slots: float | str) -> tuple[float, float]:
    """Numbers kept per weight and per row by the table's optimizer."""
    if optimizer is not None:
        name = optimizer if isinstance(optimizer, str) else None
        slots = name or type(optimizer).__name__
    if not isinstance(slots, str):
        return float(slots), 0.0
    name = slots.replace("_", "").lower()
    if name == "sgd" and getattr(optimizer, "momentum", None):
        name = "momentum"
    # An optimizer that is not known is taken to keep one, as most do.
    return _SLOTS.get(name, (1.0, 0.0))


def _ids_of_sample(feature: FeatureConfig) -> float:
    if feature.hotness is not None:
        return float(feature.hotness)
    inner = feature.input_shape[1:]
    if None in inner:
        return USUAL_HOTNESS
    return float(math.prod(size or 0 for size in inner) or 1)


def _lists_of_sample(feature: FeatureConfig, ids: float) -> float:
    """How many results a sample has."""
    if feature.table.combiner is None:
        return ids
    outer = feature.input_shape[1:-1]
    return float(math.prod(size or 1 for size in outer))


def _exponents(
    features: Sequence[FeatureConfig],
    ids: Sequence[float],
    batch_size: int,
    popularity: float | Mapping[str, float],
) -> list[float]:
    """Zipf exponent of each feature, from `unique` where that is given."""
    default = popularity_lib.DEFAULT_EXPONENT
    exponents = [
        popularity.get(feature.table.name, default)
        if isinstance(popularity, Mapping)
        else popularity
        for feature in features
    ]
    for exponent, feature in zip(exponents, features, strict=True):
        if not 0 <= exponent <= popularity_lib.LARGEST_EXPONENT:
            raise ValueError(
                "Argument `popularity` must hold exponents from 0 to "
                f"{popularity_lib.LARGEST_EXPONENT}. Received: {exponent!r} "
                f"(table {feature.table.name!r})."
            )
    known = [i for i, f in enumerate(features) if f.unique is not None]
    if known:
        fitted = popularity_lib.exponents_for(
            np.array([features[i].table.vocabulary_size for i in known], float),
            np.array([ids[i] * batch_size for i in known], float),
            np.array([features[i].unique for i in known], float),
        )
        for i, exponent in zip(known, fitted, strict=True):
            exponents[i] = float(exponent)
    return [float(exponent) for exponent in exponents]
