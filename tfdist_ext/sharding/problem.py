# SPDX-License-Identifier: Apache-2.0
"""What a plan is made for, as plain numbers that JSON can hold."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.sharding import popularity as popularity_lib
from tfdist_ext.sharding.config import TablePlacement
from tfdist_ext.sharding.tables import PLACEMENTS
from tfdist_ext.sharding.tables import FeatureConfig
from tfdist_ext.sharding.tables import TableConfig
from tfdist_ext.sharding.tables import hot_ids
from tfdist_ext.sharding.tables import placement_from_dict
from tfdist_ext.sharding.tables import placement_to_dict

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


@dataclasses.dataclass(frozen=True)
class Setting:
    """The ranks, their link and what a step is.

    Attributes:
        world_size: number of ranks, W.
        batch_size: samples per rank and step, b.
        wire_bytes: bytes of a number of a result or its gradient, f.
        link_bytes_per_second: of a rank, each way.
        read_bytes_per_second: of a rank, reading rows at random.
        memory_limit: bytes of weights and slots per rank; None for no limit.
        bytes_slack: share of bytes that may be sent beyond the least, to save
            time.
    """

    world_size: int
    batch_size: int = 256
    wire_bytes: float = 4
    link_bytes_per_second: float = 150e6
    read_bytes_per_second: float = 8e9
    memory_limit: float | None = None
    bytes_slack: float = 0.1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "memory_limit":
                continue
            if field.name == "bytes_slack":
                kind, right = "number of at least 0", value >= 0
            elif field.name in ("world_size", "batch_size"):
                whole = isinstance(value, int) and not isinstance(value, bool)
                kind, right = "positive integer", whole and value > 0
            else:
                kind, right = "positive number", 0 < value < math.inf
            if not right:
                raise ValueError(
                    f"Argument `{field.name}` must be a {kind}. Received: "
                    f"{field.name}={value!r}."
                )


@dataclasses.dataclass(frozen=True)
class TableNumbers:
    """What the cost of a table depends on; see `TableConfig`.

    Attributes:
        name: of the table.
        rows: of the table.
        dim: of the table.
        weight_bytes: of one weight.
        slots_per_weight: numbers the optimizer keeps per weight.
        slots_per_row: numbers the optimizer keeps per row (of a cell).
        hot_rows: rows kept on every rank, see `TableConfig`.
        placement: what was asked for.
        deduplicate: what was asked for.
    """

    name: str
    rows: int
    dim: int
    weight_bytes: int
    slots_per_weight: float
    slots_per_row: float
    hot_rows: int | tuple[int, ...]
    placement: str | TablePlacement
    deduplicate: bool | None

    @property
    def hot_ids(self) -> tuple[int, ...]:
        """The ids of the rows kept on every rank, ascending."""
        return hot_ids(self.hot_rows)


@dataclasses.dataclass(frozen=True)
class FeatureNumbers:
    """What the cost of a feature depends on.

    Attributes:
        name: of the feature.
        table: index of its table.
        hotness: mean ids per sample.
        exponent: how skewed its ids are, see `popularity.py`.
    """

    name: str
    table: int
    hotness: float
    exponent: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tables, features and setting of a plan."""

    tables: tuple[TableNumbers, ...]
    features: tuple[FeatureNumbers, ...]
    setting: Setting

    def index(self, table: str) -> int:
        """Index of the table of that name.

        Raises:
            ValueError: if there is none.
        """
        names = [numbers.name for numbers in self.tables]
        if table not in names:
            raise ValueError(
                f"The plan has no table {table!r}. It has: {_listed(names)}."
            )
        return names.index(table)

    def to_dict(self) -> dict[str, Any]:
        """The problem as JSON can hold it."""
        config = dataclasses.asdict(self)
        for entry, table in zip(config["tables"], self.tables, strict=True):
            if isinstance(table.placement, TablePlacement):
                entry["placement"] = placement_to_dict(table.placement)
        return config

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Problem:
        """The inverse of `to_dict`."""
        tables = [dict(entry) for entry in config["tables"]]
        for entry in tables:
            if isinstance(entry["placement"], Mapping):
                entry["placement"] = placement_from_dict(entry["placement"])
            if isinstance(entry["hot_rows"], list):
                entry["hot_rows"] = tuple(entry["hot_rows"])
        return cls(
            tuple(TableNumbers(**entry) for entry in tables),
            tuple(FeatureNumbers(**entry) for entry in config["features"]),
            Setting(**config["setting"]),
        )


def hotness(input_shape: Any, input_dim: int) -> int | None:
    """Ids per sample, read off the shape of an input of ids.

    Args:
        input_shape: shape of the input, or a list of shapes.
        input_dim: rows of the table; a last dimension of this size is a
            SparseTensor's and tells nothing.

    Returns:
        Ids per sample, None if unknown.
    """
    shape = list(input_shape)
    if shape and hasattr(shape[0], "__iter__"):  # or a TensorShape
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
    _require_distinct("tables", names)
    _require_distinct("features", [feature.name for feature in features])
    for name in forced:
        if name not in names:
            raise ValueError(
                f"Argument `forced` names no table of the plan: {name!r}. "
                f"Tables: {_listed(names)}."
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
    ids = [_hotness_of(feature) for feature in features]
    exponents = _exponents(features, ids, setting.batch_size, popularity)
    return Problem(
        tuple(_table(table, slots, forced) for table in tables),
        tuple(
            FeatureNumbers(feature.name, index, z, s)
            for feature, index, z, s in zip(
                features, indices, ids, exponents, strict=True
            )
        ),
        setting,
    )


def check_kind(table: str, placement: Any) -> None:
    """Refuses what is neither a placement nor the name of a kind.

    Raises:
        ValueError: then.
    """
    if isinstance(placement, TablePlacement) or placement in PLACEMENTS:
        return
    raise ValueError(
        f"A placement is a TablePlacement or one of {PLACEMENTS}. Received: "
        f"{placement!r} (table {table!r})."
    )


def _table(
    table: TableConfig,
    slots: float | str,
    forced: Mapping[str, TablePlacement | str],
) -> TableNumbers:
    placement = forced.get(table.name, table.placement)
    check_kind(table.name, placement)
    per_weight, per_row = _slots_of(table.optimizer, slots)
    hot_rows: Any = table.hot_rows
    if isinstance(placement, TablePlacement) and placement.hot_ids:
        hot_rows = placement.hot_ids
    return TableNumbers(
        name=table.name,
        rows=table.vocabulary_size,
        dim=table.embedding_dim,
        weight_bytes=4 if table.dtype == "float32" else 2,
        slots_per_weight=per_weight,
        slots_per_row=per_row,
        hot_rows=hot_rows,
        placement=placement,
        deduplicate=table.deduplicate,
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


def _hotness_of(feature: FeatureConfig) -> float:
    if feature.hotness is not None:
        return float(feature.hotness)
    shape = feature.input_shape
    return float((shape[-1] if len(shape) > 1 else 1) or USUAL_HOTNESS)


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


def _require_distinct(what: str, names: Sequence[str]) -> None:
    counts = collections.Counter(names)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ValueError(
            f"Names of {what} must be distinct. Received more than once: "
            f"{_listed(twice)}."
        )


def _listed(names: Sequence[str]) -> str:
    more = f", ... ({len(names)} in all)" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more
