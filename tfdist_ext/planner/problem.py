# SPDX-License-Identifier: Apache-2.0
"""What a plan is made for, as plain numbers that JSON can hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tfdist_ext.planner import popularity as popularity_lib
from tfdist_ext.tables import checks
from tfdist_ext.tables.choices import PLACEMENTS
from tfdist_ext.tables.choices import Storage
from tfdist_ext.tables.choices import full_placement
from tfdist_ext.tables.placement import MOST_RANKS
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.removed import without_removed
from tfdist_ext.tables.table_config import SIZES
from tfdist_ext.tables.table_config import SMALLEST
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict

_LARGEST_BATCH = 1 << 40
_MAY_BE_NONE = ("memory_limit", "device_memory")
# Samples per rank and step where nobody has said how many there are.
USUAL_BATCH = 256


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
        device_memory: bytes of weights and slots on a rank's GPU; None where
            ranks have none.
        batch_known: whether `batch_size` was given; otherwise it is assumed,
            which the texts of a plan say and which changes nothing else.
    """

    world_size: int
    batch_size: int = USUAL_BATCH
    wire_bytes: float = 4
    link_bytes_per_second: float = 150e6
    read_bytes_per_second: float = 8e9
    memory_limit: float | None = None
    bytes_slack: float = 0.1
    device_memory: float | None = None  # older files do not have it
    # Plans for the same numbers are equal; older files do not have it.
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
            elif field.name == "device_memory" and value is not None:
                checks.number(field.name, value, "plan")  # may be none left
            elif value is not None or field.name not in _MAY_BE_NONE:
                checks.number(field.name, value, "plan", least=SMALLEST)


def batch(size: int | None) -> dict[str, Any]:
    """The fields of `Setting` for a batch, None if it is not known."""
    if size is None:
        return {"batch_size": USUAL_BATCH, "batch_known": False}
    return {"batch_size": size, "batch_known": True}


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
        placement: what was asked for.
        deduplicate: what was asked for.
        storage: what was asked for.
    """

    name: str
    rows: int
    dim: int
    weight_bytes: int
    slots_per_weight: float
    slots_per_row: float
    placement: str | TablePlacement
    deduplicate: bool | None
    storage: Storage | None = None  # older files do not have it

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
    """What the cost of a feature depends on.

    Attributes:
        name: of the feature.
        table: index of its table.
        hotness: mean ids per list, whose rows are summed.
        exponent: how skewed its ids are, see `popularity.py`.
        lists: mean lists per sample. One, but of sequences.
    """

    name: str
    table: int
    hotness: float
    exponent: float
    lists: float = 1.0  # older files do not have it

    def __post_init__(self) -> None:
        where = f"feature {checks.brief(self.name)}"
        checks.name("a feature", self.name)
        checks.integer("table", self.table, 0, where)
        checks.number("hotness", self.hotness, where, least=SMALLEST)
        checks.number("lists", self.lists, where, least=SMALLEST)
        largest = popularity_lib.LARGEST_EXPONENT
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
        """Index of the table of that name.

        Raises:
            ValueError: if there is none.
        """
        names = [numbers.name for numbers in self.tables]
        if table not in names:
            raise ValueError(
                f"The plan has no table {table!r}. It has: "
                f"{checks.listed(names)}."
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
    def from_dict(cls, config: Any) -> Problem:
        """The inverse of `to_dict`.

        Raises:
            ValueError: for what describes none; it names the field.
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


def _check_kind(table: str, placement: Any) -> None:
    """Refuses what is neither a placement nor the name of a kind.

    Raises:
        ValueError: then.
    """
    if isinstance(placement, TablePlacement):
        return
    if isinstance(placement, str) and full_placement(placement) in PLACEMENTS:
        return
    raise ValueError(
        f"A placement is a TablePlacement or one of {PLACEMENTS}. Received: "
        f"{checks.brief(placement)} (table {table!r})."
    )
