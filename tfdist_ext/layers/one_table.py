# SPDX-License-Identifier: Apache-2.0
"""What layers of one table share: where it is, and how it is planned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.layers import layer_plan
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.layers.sparse_layer import SparseLayer
from tfdist_ext.planner.plan import ShardingPlan
from tfdist_ext.tables import checks
from tfdist_ext.tables import choices
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.shard_spec import ShardSpec
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict


class OneTable(SparseLayer):
    """Base of layers that look up in one table, placed by `sharding`.

    A subclass says what its table and its feature are (`describe`), and adds
    the table where `_place` has said it is.

    Args:
        sharding: the name of a placement, a `TablePlacement`, or the config
            of one.
        out_of_range: what an id outside of the table does.
        max_norm: see `TableConfig`.
        storage: see `TableConfig`.
        **kwargs: of a `SparseLayer`.

    Raises:
        ValueError: for values outside of these.
    """

    def __init__(
        self,
        *,
        sharding: choices.Placement | str | TablePlacement,
        out_of_range: choices.OutOfRange,
        max_norm: float | None = None,
        storage: choices.Storage | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        where = f"layer '{self.name}'"
        if isinstance(sharding, dict):
            sharding = placement_from_dict(sharding)
        if not isinstance(sharding, TablePlacement):
            sharding = choices.full_placement(sharding)
            checks.one_of("sharding", sharding, choices.PLACEMENTS, where)
        checks.one_of("out_of_range", out_of_range, choices.POLICIES, where)
        self.sharding = sharding
        # For other layers' tables as well, where they are known.
        self.plan: ShardingPlan | None = None
        self.plan_given = False
        self.out_of_range = out_of_range
        checks.max_norm(max_norm, where)
        self.max_norm = max_norm
        checks.storage(storage, where)
        self.storage = storage

    @property
    def _is_whole(self) -> bool:
        """Whether the table is an ordinary variable, whatever the ranks."""
        return self.sharding in ("data_parallel", "default_device")

    def describe(self, input_shape: Any) -> FeatureConfig:
        """The layer as a planner sees it."""
        raise NotImplementedError(type(self).__name__)

    def _place(self, input_shape: Any) -> ShardSpec:
        """Which part of the table this rank has; all ranks must call."""
        self._collectives = collectives_lib.active()
        self._described = self.describe(input_shape)
        table = self._described.table
        rank, world_size = self._rank_and_world_size()
        sharding = self._placement()
        if world_size == 1:
            sharding = TablePlacement.data_parallel()
        self.spec = ShardSpec.of(
            self.name,
            table.vocabulary_size,
            table.embedding_dim,
            sharding,
            rank,
            world_size,
            storage=layer_plan.storage_of(
                table, sharding, self.plan, self._collectives
            ),
        )
        self.feature = Feature(
            self.name,
            0,
            self.spec,
            out_of_range=self.out_of_range,
            unique=sharding.deduplicate,
        )
        self._features = [self.feature]
        self._agree(self._features)
        return self.spec

    def _placement(self) -> TablePlacement:
        asked = self.sharding
        given = asked if isinstance(asked, TablePlacement) else None
        if self._collectives is None:
            return given or TablePlacement.data_parallel()
        if given is not None and self._collectives.gpus.memory is None:
            return given  # nothing is left to plan
        if self.plan is None:
            self.plan = layer_plan.make(
                [self._described], self.wire, self._collectives
            )
            self._collectives.gpus.give(self.plan.device_memory)
        return self.plan.placement_of(self.name)

    def lookups(self) -> list[tuple[FeatureConfig, Feature]]:
        """What is looked up, for a plan and in a step."""
        return [(self._described, self.feature)]

    def take_places(
        self, features: Mapping[int, Feature], plan: ShardingPlan
    ) -> None:
        """Looks up where tables have been moved to, as a plan says."""
        self.plan, self.feature = plan, features[0]
        self.spec, self._features = self.feature.spec, [self.feature]

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config = super().get_config()
        config.update(self.wire.arguments())
        config["out_of_range"] = self.out_of_range
        config["max_norm"] = self.max_norm
        config["storage"] = self.storage
        config["sharding"] = (
            placement_to_dict(self.sharding)
            if isinstance(self.sharding, TablePlacement)
            else self.sharding
        )
        return config


def product(sizes: Any) -> int:
    """How many cells sizes make, those that are not known left out."""
    return math.prod(size or 1 for size in sizes)


def inner_sizes(input_shape: Any) -> list[int | None]:
    """The dimensions of an input behind its batch."""
    return sparse_inputs.sizes_of(input_shape)[1:]
