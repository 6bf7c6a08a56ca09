# SPDX-License-Identifier: Apache-2.0
"""The base of the sparse layers: plans, tables in parts, one lookup."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.comm import gpus
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import capture
from tfdist_ext.embedding import initial_rows
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding import whole_tables
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.embedding.pooled_lookup import pooled_lookup
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.optimizers import row_optimizer
from tfdist_ext.optimizers import rules
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.tables import checks
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.tables.plan import plan
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict


def make_plan(
    features: Sequence[FeatureConfig],
    wire: Wire,
    collectives: Collectives,
    samples: int | None = None,
    forced: Mapping[str, TablePlacement | str] | None = None,
    device_memory: float | None = None,
) -> ShardingPlan:
    """A plan for all tables that features look up in.

    Args:
        features: all.
        wire: how their numbers travel.
        collectives: of the strategy; knows what was measured, and the batch
            while one of Keras's loops runs.
        samples: of a rank in a step, if no loop tells; None if not known.
        forced: placements or kinds by table, before the tables' own.
        device_memory: of each rank's GPU; None for what is left there.

    Raises:
        ValueError: a table was asked onto a GPU, and some rank has none, or
            too little memory on it.
    """
    loop, machine = collectives.loop, collectives.machine
    if loop is not None and loop.samples is not None:
        samples = loop.samples
    if device_memory is None:
        device_memory = collectives.gpus.memory
    tables = {feature.table.name: feature.table for feature in features}
    for table in tables.values():
        if table.storage == "device":
            _check_gpu(table, collectives)
    return plan(
        list(tables.values()),
        features,
        collectives.group.world_size,
        batch_size=samples,
        wire_bytes=wire.bytes_of_number,
        device_memory=device_memory,
        forced=forced,
        **({} if machine is None else machine.speeds()),
    )


def storage_of(
    table: TableConfig,
    placement: TablePlacement,
    plan: ShardingPlan | None,
    collectives: Collectives | None,
) -> checks.Storage:
    """Where a table is: as it was asked for, or as a plan has decided.

    Without either parts are on the hosts, and what a rank has whole is
    where its other weights do.

    Args:
        table: which.
        placement: of the table.
        plan: with the table; None without one.
        collectives: of the strategy; None in one process.

    Raises:
        ValueError: on a GPU, and some rank has none.
    """
    found = table.storage
    if found is None:
        if plan is None or plan.problem.setting.device_memory is None:
            parts = collectives is not None and bool(placement.ranks)
            return "host" if parts else "device"
        found = plan.storage_of(table.name)
    if found == "device":
        _check_gpu(table, collectives)
    return found


def _check_gpu(table: TableConfig, collectives: Collectives | None) -> None:
    reason = _why_no_gpu(collectives)
    if reason:
        raise ValueError(
            f"Table {table.name!r} is to lie on a GPU, and there is none for "
            f"it: {reason}. Received: storage={table.storage!r}. Leave "
            "`storage` out, or use storage='host'; make a plan without "
            "`device_memory`."
        )


def _why_no_gpu(collectives: Collectives | None) -> str:
    if collectives is not None:
        return collectives.gpus.reason
    return "" if gpus.visible_device() is not None else gpus.NO_GPU


keras = tf.keras

# For `add_weight`: tf_keras would round a weight to the compute dtype of a
# mixed policy wherever it is read.
KEEP_DTYPE = {} if KERAS_3 else {"experimental_autocast": False}


def _field_of_wire(field: str) -> Any:
    return property(lambda layer: getattr(layer.wire, field))


class SparseLayer(keras.layers.Layer):  # type: ignore[name-defined]
    """Base of layers whose weights are partitioned over the ranks.

    A subclass sets `_collectives` and `_features` when it is built, and says
    what the ids of its inputs are (`_ids`) and which variables they are
    looked up in (`table_variables`).

    Args:
        wire: how ids and numbers travel.
        prefetch_ids: whether `preprocess` makes inputs whose ids are
            exchanged a step ahead.
        **kwargs: of a Keras layer.
    """

    # `keras_training.shared_exchanges` counts such layers of a model.
    looks_up_tables = True
    _features: Sequence[Feature]

    def __init__(
        self, *, wire: Wire, prefetch_ids: bool = False, **kwargs: Any
    ) -> None:
        # Ids must not be cast, and tables have a dtype of their own.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.wire = dataclasses.replace(wire, label=self.name)
        self.prefetch_ids = prefetch_ids
        self._collectives: Collectives | None = None
        self.supports_jit = False
        hold(Need.TABLES, self)

    wire_dtype = _field_of_wire("dtype")
    wire_rounding = _field_of_wire("rounding")
    wire_packing = _field_of_wire("packed")

    def _ids(self, *inputs: Any) -> list[list[Ids]]:
        """Lists of ids whose results are summed, for every feature."""
        raise NotImplementedError(type(self).__name__)

    def _layouts(self, inputs: Any) -> Sequence[Layout]:
        """How the results of every feature lie.

        Args:
            inputs: as for `_ids`, or what `preprocess` made.
        """
        raise NotImplementedError(type(self).__name__)

    def table_variables(self) -> list[Any]:
        """This rank's part of each table, by its number in the features."""
        raise NotImplementedError(type(self).__name__)

    def _own_variables(self) -> Mapping[str, Any]:
        """What files hold of this layer alone, by name."""
        return {}

    def _look_up(self, *inputs: Any, learn: bool = False) -> list[tf.Tensor]:
        """Pooled rows of every feature, float32 `[batch, dim]`.

        Args:
            *inputs: for `_ids`, or the one that `preprocess` made.
            learn: see `pooled_lookup`.
        """
        place = None if self._collectives is None else self._place_ahead
        given = prefetched_ids.for_call(inputs[0], place)
        if given is None:
            known = capture.known_answer(self._features)
            if known is not None:
                return known
            given = self._ids(*inputs), None
        ids, ahead = given
        return pooled_lookup(
            ids,
            self._features,
            self._made_tables(),
            self._collectives,
            self.wire,
            ahead,
            learn,
        )

    def _made_tables(self) -> list[Any]:
        tables = self.table_variables()
        if any(keras_internals.value_of(table) is None for table in tables):
            raise ValueError(
                f"Layer '{self.name}' is first called in a tf.function of "
                "yours while Keras builds the model, where variables cannot be "
                "made. Call or build it before: "
                "`with strategy.scope(): layer.build(input_shape)`."
            )
        return tables

    def _place_ahead(self) -> str:
        assert self._collectives is not None
        return self._collectives.place_of(self)

    def preprocess(self, inputs: Any) -> Any:
        """Prepares inputs in the input pipeline.

        To be mapped over a dataset. With `prefetch_ids=True` every step then
        exchanges the ids of the next batch, see
        `DistributedEmbedding.preprocess`; otherwise nothing is changed.

        Args:
            inputs: see the class.

        Returns:
            What the layer takes as its input.
        """
        if self.prefetch_ids:
            return prefetched_ids.bundle(
                self._ids(inputs), self._layouts(inputs)
            )
        return inputs

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Those of the strategy; rank 0 of 1 without one."""
        if self._collectives is None:
            return 0, 1
        return self._collectives.group.rank, self._collectives.group.world_size

    def _agree(self, features: Sequence[Feature]) -> None:
        """Compares where the ranks have the tables; all must call.

        Raises:
            tf.errors.InvalidArgumentError: on every rank, if one has a table
                otherwise, or another layer.
        """
        if self._collectives is None:
            return
        with tf.init_scope():
            self._collectives.group.check_same(
                [
                    f"'{feature.name}' in {feature.spec}"
                    + ", unique rows" * feature.unique
                    for feature in features
                ]
            )

    def _add_table(
        self,
        name: str,
        spec: ShardSpec,
        initializer: Any,
        optimizer: Any = None,
        keys: Any = None,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Adds the weight that holds this rank's part of a table.

        Args:
            name: of the weight.
            spec: which part.
            initializer: of Keras, for the whole table.
            optimizer: for this table alone, None to leave it to the model's.
            keys: `KeyShard` of a table whose vocabulary grows, else None.
            max_norm: the longest that a row may be.
            **kwargs: for `add_weight`.
        """
        with sharded_variable.creating(spec):
            variable = self.add_weight(
                name=name,
                shape=spec.local_shape,
                initializer=initial_rows.for_shard(
                    initializer, spec, self._collectives
                ),
                **{"dtype": "float32", **KEEP_DTYPE, **kwargs},
            )

        def made() -> None:
            whole_tables.accept_whole(variable)
            if keys is not None:
                keys.attach(keras_internals.value_of(variable))
            if optimizer is not None:
                rules.attach_optimizer(variable, optimizer)
            if max_norm is not None:
                row_optimizer.limit_row_norms(variable, max_norm)

        keras_internals.when_made(
            variable, lambda: sharded_variable.creating(spec), made
        )
        return variable

    def save_own_variables(self, store: Any) -> None:
        """Writes tables whole; all ranks call, rank 0's file stays."""
        if not self.built:
            return
        for name, variable in self._own_variables().items():
            value = variable
            if self._collectives and sharded_variable.is_shard(variable):
                value = whole_tables.gather_to_first(
                    variable, self._collectives
                )
            store[name] = value  # once: a file refuses a second value

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of every table."""
        for name, variable in self._own_variables().items():
            if sharded_variable.is_shard(variable):
                whole_tables.assign_part(variable, store[name])
            else:
                variable.assign(store[name])

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets the weights in order, tables whole or as this rank's part.

        Args:
            weights: anything that can be sliced, a memory map for example.
        """
        whole_tables.set_weights(self, weights)

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config: dict[str, Any] = super().get_config()
        config["prefetch_ids"] = self.prefetch_ids
        return config


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
        sharding: checks.Placement | str | TablePlacement,
        out_of_range: checks.OutOfRange,
        max_norm: float | None = None,
        storage: checks.Storage | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        where = f"layer '{self.name}'"
        if isinstance(sharding, dict):
            sharding = placement_from_dict(sharding)
        if not isinstance(sharding, TablePlacement):
            sharding = checks.full_placement(sharding)
            checks.one_of("sharding", sharding, checks.PLACEMENTS, where)
        checks.one_of("out_of_range", out_of_range, checks.POLICIES, where)
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
            storage=storage_of(table, sharding, self.plan, self._collectives),
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
            self.plan = make_plan(
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
