# SPDX-License-Identifier: Apache-2.0
"""One plan for all tables of a model, and the move of tables to it.

A layer that is built alone is also placed alone: its placement does not take
other layers into account and, often, not the batch size. Before a model is
trained, both are known. All its tables are then planned jointly, and those with
a better placement are moved.
"""

from __future__ import annotations

import collections as containers
import dataclasses
import logging
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.layers import sparse_layer
from tfdist_ext.layers.distributed_embedding import DistributedEmbedding
from tfdist_ext.layers.sparse_layer import OneTable
from tfdist_ext.tables import checks
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Variable

# A plan replaces the current one if its cost is at most this fraction of it.
_WORTHWHILE = 0.95


def layers_of(model: Model) -> list[OneTable | DistributedEmbedding]:
    """Returns the layers with tables of a model and its submodels, in order."""
    found = keras_internals.layers_of(model)
    kinds = (OneTable, DistributedEmbedding)
    # A layer that occurs twice is listed once.
    return list(dict.fromkeys(x for x in found if isinstance(x, kinds)))


@dataclasses.dataclass(frozen=True)
class _Table:
    """A table of a built layer.

    Attributes:
        layer: the layer.
        config: the table's config, under its name in the joint plan.
        features: the features that look up in the table, under their names in
            the joint plan.
        variable: this rank's part of the table.
        feature: one of the features, as the lookup uses it.
        movable: whether the table may be moved.
    """

    layer: OneTable | DistributedEmbedding
    config: TableConfig
    features: list[FeatureConfig]
    variable: Variable
    feature: Feature
    movable: bool

    @property
    def placement(self) -> TablePlacement:
        """The current placement."""
        spec = self.feature.spec
        if not spec.partitioned:
            return TablePlacement.data_parallel()
        return TablePlacement(
            spec.row_parts,
            spec.column_parts,
            spec.ranks,
            self.feature.unique,
        )

    @property
    def asked(self) -> TablePlacement | str:
        """The placement that a joint plan must respect.

        A partitioned table stays partitioned, and an unpartitioned table
        stays unpartitioned, because their variables are of different types.
        """
        if not self.movable:
            return self.placement
        kind = self.config.placement
        return "sparsecore" if kind == "auto" else kind


def place(model: Model, collectives: Collectives) -> None:
    """Plans the tables of a model jointly, and moves those that gain by it.

    A joint call of all ranks. Layers that are not built are left out. A table
    is not moved if a graph or a slot relies on its placement, if the user has
    placed it, or if every rank has it entirely. Tables with the same wire
    dtype share one plan.

    Args:
        model: a Keras model.
        collectives: the strategy's collectives.
    """
    built = [x for x in layers_of(model) if x.built]
    tables = _tables_of(built, collectives)
    if _has_slots(getattr(model, "optimizer", None)):
        tables = [dataclasses.replace(t, movable=False) for t in tables]
    tables = _movable_everywhere(tables, collectives)
    if not any(table.movable for table in tables):
        return
    by_dtype = containers.defaultdict(list)
    for table in tables:
        by_dtype[table.layer.wire_dtype].append(table)
    for together in by_dtype.values():
        if any(table.movable for table in together):
            _place_together(together, collectives)


def _has_slots(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer has slots, also if made outside of the scope."""
    variables = getattr(optimizer, "variables", ())
    if callable(variables):  # tf_keras.optimizers.legacy
        variables = variables()
    return any(len(variable.shape) for variable in variables)


def _tables_of(
    layers: Sequence[OneTable | DistributedEmbedding], collectives: Collectives
) -> list[_Table]:
    """Returns the tables of layers, under their names in the joint plan."""
    found = [
        (layer, index, pairs)
        for layer in layers
        for index, pairs in sorted(_by_table(layer).items())
    ]
    counts = containers.Counter(pairs[0][0].table.name for *_, pairs in found)
    tables = []
    for number, (layer, index, pairs) in enumerate(found):
        config, feature = pairs[0][0].table, pairs[0][1]
        if counts[config.name] > 1:
            # Several layers may have the same name, so add a number.
            name = f"{layer.name}/{config.name}/{number}"
            config = dataclasses.replace(config, name=name)
        if collectives.gpus.memory is not None:
            # A variable stays on its device.
            storage = feature.spec.storage
            config = dataclasses.replace(config, storage=storage)
        variable = layer.table_variables()[index]
        tables.append(
            _Table(
                layer,
                config,
                [
                    dataclasses.replace(
                        each, name=f"{config.name}/{each.name}", table=config
                    )
                    for each, _ in pairs
                ],
                variable,
                feature,
                movable=(
                    layer.plan_given is False
                    and not isinstance(config.placement, TablePlacement)
                    and feature.spec.partitioned
                    and marks.shard_spec(variable) is not None
                    and not marks.is_fixed(variable)
                ),
            )
        )
    return tables


def _by_table(
    layer: OneTable | DistributedEmbedding,
) -> dict[int, list[tuple[FeatureConfig, Feature]]]:
    """Returns the features of a layer by the index of their table."""
    found: dict[int, list[tuple[FeatureConfig, Feature]]] = {}
    for config, feature in layer.lookups():
        found.setdefault(feature.table, []).append((config, feature))
    return found


def _movable_everywhere(
    tables: list[_Table], collectives: Collectives
) -> list[_Table]:
    """Marks tables as movable only if they are movable on every rank.

    A rank may have traced a graph that other ranks have not traced.
    """
    own = [int(table.movable) for table in tables]
    (votes,) = collectives.all_reduce(
        [tf.constant(own, tf.int32)], "tables to place"
    )
    return [
        dataclasses.replace(table, movable=bool(count))
        for table, count in zip(
            tables, votes.numpy() == collectives.group.world_size, strict=True
        )
    ]


def _place_together(tables: Sequence[_Table], collectives: Collectives) -> None:
    now = {table.config.name: table.placement for table in tables}
    planned = sparse_layer.make_plan(
        [feature for table in tables for feature in table.features],
        tables[0].layer.wire,
        collectives,
        forced={table.config.name: table.asked for table in tables},
        device_memory=(
            None if collectives.gpus.memory is None else checks.LARGEST
        ),
    )
    as_it_is = ShardingPlan(planned.problem, now)
    best = planned if _is_worthwhile(planned, as_it_is) else as_it_is
    moved = [t for t in tables if best.placements[t.config.name] != t.placement]
    _log_move(best, as_it_is, len(moved), collectives)
    features = _features_after(tables, best, collectives)
    with tf.init_scope():
        collectives.group.check_same([str(f.spec) for f in features.values()])
    for table in moved:
        spec = features[table.config.name].spec
        if spec != table.feature.spec:
            sharded_variable.move_table(table.variable, spec, collectives)
    for layer in dict.fromkeys(table.layer for table in tables):
        own = {
            table.feature.table: features[table.config.name]
            for table in tables
            if table.layer is layer
        }
        layer.set_placements(own, best)


def _is_worthwhile(planned: ShardingPlan, now: ShardingPlan) -> bool:
    """Whether a plan sends less, or is faster without sending more."""
    if planned.bytes_per_step <= _WORTHWHILE * now.bytes_per_step:
        return True
    most = (1 + now.problem.setting.bytes_slack) * now.bytes_per_step
    faster = planned.seconds_per_step <= _WORTHWHILE * now.seconds_per_step
    return faster and planned.bytes_per_step <= most


def _features_after(
    tables: Sequence[_Table], best: ShardingPlan, collectives: Collectives
) -> Mapping[str, Feature]:
    """Returns the features after the move, by the name of their table."""
    group = collectives.group
    features = {}
    for table in tables:
        placement = best.placements[table.config.name]
        old = table.feature.spec
        spec = ShardSpec.of(
            old.table,
            old.rows,
            old.dim,
            placement,
            group.rank,
            group.world_size,
            grows=old.grows,
            storage=old.storage,
        )
        features[table.config.name] = dataclasses.replace(
            table.feature, spec=spec, unique=placement.deduplicate
        )
    return features


def _log_move(
    best: ShardingPlan,
    now: ShardingPlan,
    moved: int,
    collectives: Collectives,
) -> None:
    if moved and collectives.group.rank == 0:
        logging.getLogger("tfdist_ext").info(
            "%d of %d tables go to other places: the busiest rank sends "
            "%.0f kB per step instead of %.0f.",
            moved,
            len(best.placements),
            best.bytes_per_step / 1e3,
            now.bytes_per_step / 1e3,
        )
