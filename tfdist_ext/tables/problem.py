# SPDX-License-Identifier: Apache-2.0
"""The input of the planner: machines, tables and features as numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import PLACEMENTS
from tfdist_ext.tables.checks import Storage
from tfdist_ext.tables.checks import full_placement
from tfdist_ext.tables.checks import without_removed
from tfdist_ext.tables.placement import MOST_RANKS
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import SIZES
from tfdist_ext.tables.table_config import SMALLEST
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict


@dataclasses.dataclass(frozen=True)
class Machine:
    """Speeds that a plan is made for, see `tfdist_ext.measure_machine`.

        plan(tables, features, world_size, **machine.speeds())

    Attributes:
        link_bytes_per_second: bytes per second that a rank sends, and receives
            at the same time, while all ranks do.
        read_bytes_per_second: bytes per second of table rows that a rank reads
            at random, while all ranks do.
        cores: processor cores per rank; plans do not use it.
    """

    link_bytes_per_second: float
    read_bytes_per_second: float
    cores: float

    def speeds(self) -> checks.Fields:
        """The speeds as arguments of `plan`."""
        return {
            "link_bytes_per_second": self.link_bytes_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
        }

    def __str__(self) -> str:
        """One line for a log."""
        return (
            f"link {self.link_bytes_per_second / 1e6:.0f} MB/s, rows read at "
            f"{self.read_bytes_per_second / 1e9:.2f} GB/s, "
            f"{self.cores:g} cores per rank"
        )


Floats = npt.NDArray[np.float64]

DEFAULT_EXPONENT = 1.1
LARGEST_EXPONENT = 8.0

_RAW_IDS = 2.0**63
_SINGLE_RANKS = 8
_GROWTH = 1.3


class Popularity:
    """Row popularity of several features, after Zipf's law.

    Args:
        rows: rows of each feature's table, `[F]`.
        exponents: Zipf exponent s of each feature, `[F]`.
    """

    def __init__(self, rows: Floats, exponents: Floats) -> None:
        last = rows[:, None] + 1.0
        edges = _edges(float(rows.max(initial=1.0)))
        first = np.minimum(edges[:-1], last)
        end = np.minimum(edges[1:], last)
        s = exponents[:, None]
        norm = _sum_of_powers(_edges(_RAW_IDS), s).sum(1, keepdims=True)
        mass = _sum_of_powers(np.hstack([first, end[:, -1:]]), s) / norm
        tail = np.maximum(1.0 - mass.sum(1, keepdims=True), 0.0)
        self._count = end - first
        self._chance = (
            mass / np.maximum(self._count, 1.0) + tail / rows[:, None]
        )
        self._log_miss = np.log1p(-np.minimum(self._chance, 1.0 - 1e-12))

    def unique(self, draws: Floats) -> Floats:
        """Expected number of unique rows among `draws` ids, `[F]`."""
        drawn = -np.expm1(draws[:, None] * self._log_miss)
        return np.asarray(np.minimum((self._count * drawn).sum(1), draws))

    def repeated(self, draws: Floats) -> Floats:
        """Expected number of rows that occur more than once, `[F]`."""
        n = draws[:, None]
        once = n * self._chance * np.exp((n - 1.0) * self._log_miss)
        several = -np.expm1(n * self._log_miss) - once
        return np.asarray((self._count * np.maximum(several, 0.0)).sum(1))


def exponents_for(rows: Floats, draws: Floats, unique: Floats) -> Floats:
    """The exponents for which `draws` ids have `unique` unique rows.

    Args:
        rows: rows of each table, `[F]`.
        draws: number of ids, `[F]`.
        unique: number of unique rows among them, `[F]`; if no exponent gives
            this number, the nearest one is used.

    Returns:
        `[F]`.
    """
    low = np.zeros_like(rows)
    high = np.full_like(rows, LARGEST_EXPONENT)
    for _ in range(30):
        middle = 0.5 * (low + high)
        # More skewed ids have fewer unique rows.
        more = Popularity(rows, middle).unique(draws) > unique
        low = np.where(more, middle, low)
        high = np.where(more, high, middle)
    return 0.5 * (low + high)


def _edges(last: float) -> Floats:
    """First ranks of the ranges that cover ranks 1 to `last`, and the end."""
    single = np.arange(1.0, _SINGLE_RANKS + 1.0)
    steps = max(math.ceil(math.log(last / _SINGLE_RANKS, _GROWTH)), 0) + 1
    grown = _SINGLE_RANKS * _GROWTH ** np.arange(1.0, steps + 1.0)
    return np.concatenate([single, np.ceil(grown), [last + 1.0]]).clip(
        max=last + 1.0
    )


def _sum_of_powers(edges: Floats, s: Floats) -> Floats:
    """Sums of k^-s over the ranges between `edges`, `[F, ranges]`."""
    edges = np.broadcast_to(edges, (len(s), edges.shape[-1]))
    first, end = edges[:, :-1], edges[:, 1:]
    # Integral that begins half a rank earlier; exact for a range of one rank.
    power = np.where(np.abs(1.0 - s) < 1e-9, 1e-9, 1.0 - s)
    start = first - 0.5
    ratio = np.log((end - 0.5) / start)
    area = start**power * np.expm1(power * ratio) / power
    return np.asarray(np.where(end - first == 1.0, first**-s, area))


_LARGEST_BATCH = 1 << 40
_MAY_BE_NONE = ("memory_limit", "device_memory")
# Samples per rank and step if the number is not given.
USUAL_BATCH = 256


@dataclasses.dataclass(frozen=True)
class Setting:
    """The ranks, their links and the size of a step.

    Attributes:
        world_size: number of ranks, W.
        batch_size: samples per rank and step, b.
        wire_bytes: bytes of one number of a result or its gradient, f.
        link_bytes_per_second: bytes per second of a rank, each way.
        read_bytes_per_second: bytes per second that a rank reads of random
            rows.
        memory_limit: bytes of weights and slots per rank; None for no limit.
        bytes_slack: share of bytes that may be sent beyond the least, to save
            time.
        device_memory: bytes of weights and slots on a rank's GPU; None if ranks
            have no GPUs.
        rank_speeds: relative speed of each rank: its seconds of computing are
            divided by it. None if all are equal.
        batch_known: whether `batch_size` was given. If it is assumed, the texts
            of a plan say so; nothing else depends on this.
    """

    world_size: int
    batch_size: int = USUAL_BATCH
    wire_bytes: float = 4
    link_bytes_per_second: float = 150e6
    read_bytes_per_second: float = 8e9
    memory_limit: float | None = None
    bytes_slack: float = 0.1
    device_memory: float | None = None  # missing in older files
    rank_speeds: Sequence[float] | None = None  # missing in older files
    # It does not count in comparisons of plans, and is missing in older files.
    batch_known: bool = dataclasses.field(default=True, compare=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "world_size":
                checks.integer(field.name, value, 1, "plan", MOST_RANKS)
            elif field.name == "batch_size":
                checks.integer(field.name, value, 1, "plan", _LARGEST_BATCH)
            elif field.name == "batch_known":
                checks.boolean(field.name, value, "plan", optional=False)
            elif field.name == "bytes_slack":
                if value != math.inf:
                    checks.number(field.name, value, "plan")
            elif field.name == "rank_speeds":
                self._check_speeds()
            elif field.name == "device_memory" and value is not None:
                checks.number(field.name, value, "plan")  # may be 0
            elif value is not None or field.name not in _MAY_BE_NONE:
                checks.number(field.name, value, "plan", least=SMALLEST)

    def _check_speeds(self) -> None:
        if self.rank_speeds is None:
            return
        entries = checks.entries(self.rank_speeds, "rank_speeds")
        if len(entries) != self.world_size:
            raise ValueError(
                f"Argument `rank_speeds` must have one number for each of the "
                f"{self.world_size} ranks. Received: rank_speeds="
                f"{checks.brief(self.rank_speeds)} (plan)."
            )
        for value in entries:
            checks.number("rank_speeds", value, "plan", least=SMALLEST)
        object.__setattr__(self, "rank_speeds", tuple(map(float, entries)))


def batch(size: int | None) -> checks.Fields:
    """The fields of `Setting` for a batch size, None if unknown."""
    if size is None:
        return {"batch_size": USUAL_BATCH, "batch_known": False}
    return {"batch_size": size, "batch_known": True}


@dataclasses.dataclass(frozen=True)
class TableNumbers:
    """The numbers that the cost of a table depends on; see `TableConfig`.

    Attributes:
        name: name of the table.
        rows: rows of the table.
        dim: columns of the table.
        weight_bytes: bytes of one weight.
        slots_per_weight: numbers that the optimizer stores per weight.
        slots_per_row: numbers that the optimizer stores per row (of a cell).
        placement: requested placement.
        deduplicate: requested value.
        storage: requested storage.
    """

    name: str
    rows: int
    dim: int
    weight_bytes: int
    slots_per_weight: float
    slots_per_row: float
    placement: str | TablePlacement
    deduplicate: bool | None
    storage: Storage | None = None  # missing in older files

    def __post_init__(self) -> None:
        where = f"table {checks.brief(self.name)}"
        checks.name("a table", self.name)
        for field, most in zip(("rows", "dim"), SIZES.values(), strict=True):
            checks.integer(field, getattr(self, field), 1, where, most)
        checks.integer("weight_bytes", self.weight_bytes, 1, where, 8)
        checks.number("slots_per_weight", self.slots_per_weight, where)
        checks.number("slots_per_row", self.slots_per_row, where)
        _check_kind(self.name, self.placement)
        placement = full_placement(self.placement)
        object.__setattr__(self, "placement", placement)
        checks.boolean("deduplicate", self.deduplicate, where)
        checks.storage(self.storage, where)


@dataclasses.dataclass(frozen=True)
class FeatureNumbers:
    """The numbers that the cost of a feature depends on.

    Attributes:
        name: name of the feature.
        table: index of its table.
        hotness: mean ids per list; the rows of a list are summed.
        exponent: Zipf exponent of its ids, see `Popularity`.
        lists: mean lists per sample; 1 except for sequences.
    """

    name: str
    table: int
    hotness: float
    exponent: float
    lists: float = 1.0  # missing in older files

    def __post_init__(self) -> None:
        where = f"feature {checks.brief(self.name)}"
        checks.name("a feature", self.name)
        checks.integer("table", self.table, 0, where)
        checks.number("hotness", self.hotness, where, least=SMALLEST)
        checks.number("lists", self.lists, where, least=SMALLEST)
        largest = LARGEST_EXPONENT
        checks.number("exponent", self.exponent, where, most=largest)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Tables, features and setting of a plan."""

    tables: tuple[TableNumbers, ...]
    features: tuple[FeatureNumbers, ...]
    setting: Setting

    def __post_init__(self) -> None:
        checks.distinct("tables", [table.name for table in self.tables])
        checks.distinct("features", [f.name for f in self.features])
        for feature in self.features:
            if feature.table >= len(self.tables):
                raise ValueError(
                    f"Feature {feature.name!r} looks up in table "
                    f"{feature.table} of {len(self.tables)}."
                )

    def index(self, table: str) -> int:
        """Index of the table with a name.

        Raises:
            ValueError: there is no such table.
        """
        names = [numbers.name for numbers in self.tables]
        if table not in names:
            raise ValueError(
                f"The plan has no table {table!r}. It has: "
                f"{checks.listed(names)}."
            )
        return names.index(table)

    def to_dict(self) -> checks.Fields:
        """The problem as JSON values."""
        config = dataclasses.asdict(self)
        for entry, table in zip(config["tables"], self.tables, strict=True):
            if isinstance(table.placement, TablePlacement):
                entry["placement"] = placement_to_dict(table.placement)
        return config

    @classmethod
    def from_dict(cls, config: object) -> Problem:
        """The inverse of `to_dict`.

        Raises:
            ValueError: the config describes no problem; the message names the
                field.
        """
        fields = checks.fields_of(cls, config, "problem")
        tables = []
        entries = checks.entries(fields["tables"], "problem.tables")
        for i, entry in enumerate(entries):
            where = f"problem.tables[{i}]"
            entry = without_removed(entry, "hot_rows", where)
            numbers = checks.fields_of(TableNumbers, entry, where)
            if isinstance(numbers["placement"], Mapping):
                numbers["placement"] = placement_from_dict(
                    numbers["placement"], f"{where}.placement"
                )
            tables.append(TableNumbers(**numbers))
        entries = checks.entries(fields["features"], "problem.features")
        features = [
            checks.fields_of(FeatureNumbers, entry, f"problem.features[{i}]")
            for i, entry in enumerate(entries)
        ]
        setting = checks.fields_of(
            Setting, fields["setting"], "problem.setting"
        )
        return cls(
            tuple(tables),
            tuple(FeatureNumbers(**entry) for entry in features),
            Setting(**setting),
        )


def _check_kind(table: str, placement: object) -> None:
    """Rejects a value that is neither a placement nor the name of a kind.

    Raises:
        ValueError: the value is neither.
    """
    if isinstance(placement, TablePlacement):
        return
    if isinstance(placement, str) and full_placement(placement) in PLACEMENTS:
        return
    raise ValueError(
        f"A placement is a TablePlacement or one of {PLACEMENTS}. Received: "
        f"{checks.brief(placement)} (table {table!r})."
    )


# Ids per sample that are assumed if the input does not have the number.
USUAL_HOTNESS = 100.0

# Stored numbers of an optimizer: (per weight, per row).
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
    """Ids per sample, from the shape of an input of ids.

    Args:
        input_shape: shape of the input, or a list or dict of shapes; None if
            unknown.
        input_dim: rows of the table; a last dimension of this size is of a
            SparseTensor and does not give the number of ids.

    Returns:
        Ids per sample, None if unknown.
    """
    if isinstance(input_shape, Mapping):
        input_shape = list(input_shape.values())
    rank = getattr(input_shape, "rank", 0)  # None for an unknown TensorShape
    if input_shape is None or rank is None:
        return None
    shape = list(input_shape)
    if not shape:
        return None
    if hasattr(shape[0], "__iter__"):  # list or TensorShape
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
    """Converts configurations to numbers; see `plan.plan` for arguments.

    Raises:
        ValueError: the arguments contradict each other.
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


def _slots_of(optimizer: object, slots: float | str) -> tuple[float, float]:
    """Numbers per weight and per row that the table's optimizer stores."""
    if optimizer is not None:
        name = optimizer if isinstance(optimizer, str) else None
        slots = name or type(optimizer).__name__
    if not isinstance(slots, str):
        return float(slots), 0.0
    name = slots.replace("_", "").lower()
    if name == "sgd" and getattr(optimizer, "momentum", None):
        name = "momentum"
    # An unknown optimizer is assumed to have one slot per weight, as most do.
    return _SLOTS.get(name, (1.0, 0.0))


def _ids_of_sample(feature: FeatureConfig) -> float:
    if feature.hotness is not None:
        return float(feature.hotness)
    inner = feature.input_shape[1:]
    if None in inner:
        return USUAL_HOTNESS
    return float(math.prod(size or 0 for size in inner) or 1)


def _lists_of_sample(feature: FeatureConfig, ids: float) -> float:
    """Number of results of a sample."""
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
    """Zipf exponent of each feature, from `unique` if given."""
    default = DEFAULT_EXPONENT
    exponents = [
        popularity.get(feature.table.name, default)
        if isinstance(popularity, Mapping)
        else popularity
        for feature in features
    ]
    for exponent, feature in zip(exponents, features, strict=True):
        if not 0 <= exponent <= LARGEST_EXPONENT:
            raise ValueError(
                "Argument `popularity` must hold exponents from 0 to "
                f"{LARGEST_EXPONENT}. Received: {exponent!r} "
                f"(table {feature.table.name!r})."
            )
    known = [i for i, f in enumerate(features) if f.unique is not None]
    if known:
        fitted = exponents_for(
            np.array([features[i].table.vocabulary_size for i in known], float),
            np.array([ids[i] * batch_size for i in known], float),
            np.array([features[i].unique for i in known], float),
        )
        for i, exponent in zip(known, fitted, strict=True):
            exponents[i] = float(exponent)
    return [float(exponent) for exponent in exponents]
