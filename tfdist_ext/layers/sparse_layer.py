# SPDX-License-Identifier: Apache-2.0
"""Base classes of the sparse layers: plan, tables, lookup and saving."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext import marks
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
from tfdist_ext.embedding.key_shard import KeyShard
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
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import Store
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


def make_plan(
    features: Sequence[FeatureConfig],
    wire: Wire,
    collectives: Collectives,
    samples: int | None = None,
    forced: Mapping[str, TablePlacement | str] | None = None,
    device_memory: float | None = None,
) -> ShardingPlan:
    """Makes a plan for all tables of some features.

    Args:
        features: the features of all tables.
        wire: the wire format of their results.
        collectives: the strategy's collectives, which have the measured speeds
            of the machine, and the batch size while a Keras loop runs.
        samples: samples per rank and step, used outside of Keras's loops; None
            if not known.
        forced: placements or names of placements by table, which override the
            tables' own.
        device_memory: bytes for tables on each rank's GPU; None uses what is
            still free there.

    Raises:
        ValueError: if a table has `storage="device"`, and a rank has no GPU or
            too little GPU memory.
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
        rank_speeds=collectives.rank_speeds,
        **({} if machine is None else machine.speeds()),
    )


def storage_of(
    table: TableConfig,
    placement: TablePlacement,
    plan: ShardingPlan | None,
    collectives: Collectives | None,
) -> checks.Storage:
    """Returns the storage of a table: its own, or else that of a plan.

    If neither specifies it, partitioned tables are stored on the hosts, and
    unpartitioned tables on the device of the rank's other weights.

    Args:
        table: the config of the table.
        placement: the placement of the table.
        plan: the plan that contains the table, or None.
        collectives: the strategy's collectives; None in one process.

    Raises:
        ValueError: if the storage is "device" and a rank has no GPU.
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
            f"Table {table.name!r} cannot be placed on a GPU: {reason}. "
            f"Received: storage={table.storage!r}. Leave `storage` out, or "
            "use storage='host'; make a plan without `device_memory`."
        )


def _why_no_gpu(collectives: Collectives | None) -> str:
    if collectives is not None:
        return collectives.gpus.reason
    return "" if gpus.visible_device() is not None else gpus.NO_GPU


# Arguments of `add_weight`. Under a mixed policy, tf_keras would otherwise
# round a weight to the compute dtype whenever it is read.
KEEP_DTYPE = {} if KERAS_3 else {"experimental_autocast": False}


def _field_of_wire(field: str) -> property:
    return property(lambda layer: getattr(layer.wire, field))


class SparseLayer(keras.layers.Layer):  # type: ignore[name-defined]
    """Base class of layers whose weights are partitioned over the ranks.

    When a subclass is built, it sets `_collectives` and `_features`. It
    implements `_ids`, which returns the ids of its inputs, and
    `table_variables`, which returns the variables of its tables.

    Args:
        wire: the wire format of ids and results.
        prefetch_ids: whether ids of the inputs that `preprocess` makes are
            exchanged one step ahead.
        **kwargs: arguments of a Keras layer.
    """

    # Packages below this one find layers with tables by this attribute.
    looks_up_tables = True
    # Whether the layer is used in place of `keras.layers.Embedding`.
    _like_keras: bool = True
    _features: Sequence[Feature]

    def __init__(
        self, *, wire: Wire, prefetch_ids: bool = False, **kwargs: Any
    ) -> None:
        # Keras must not cast ids. Tables have a dtype of their own.
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
        """Returns for every feature the `Ids` whose results are summed."""
        raise NotImplementedError(type(self).__name__)

    def _layouts(self, inputs: TensorLike) -> Sequence[Layout]:
        """Returns the layout of every feature's results.

        Args:
            inputs: the inputs of `_ids`, or the result of `preprocess`.
        """
        raise NotImplementedError(type(self).__name__)

    def table_variables(self) -> list[Variable]:
        """Returns this rank's part of each table, by its `Feature.table`."""
        raise NotImplementedError(type(self).__name__)

    def _own_variables(self) -> Mapping[str, Variable]:
        """Returns the variables that Keras saves for this layer, by name."""
        return {}

    def _look_up(
        self, *inputs: TensorLike, learn: bool = False
    ) -> list[tf.Tensor]:
        """Returns pooled rows of every feature, float32 `[batch, dim]`.

        Args:
            *inputs: the inputs of `_ids`, or the result of `preprocess`.
            learn: whether dynamic vocabularies assign rows to new keys.
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

    def _made_tables(self) -> list[Variable]:
        tables = self.table_variables()
        if any(keras_internals.value_of(table) is None for table in tables):
            raise ValueError(
                f"Layer '{self.name}' is first called in a tf.function of "
                "yours while Keras builds the model. Variables cannot be "
                "created there. Call or build the layer before: `with "
                "strategy.scope(): layer.build(input_shape)`."
            )
        return tables

    def _place_ahead(self) -> str:
        assert self._collectives is not None
        return self._collectives.place_of(self)

    def preprocess(self, inputs: TensorLike) -> Nest:
        """Prepares inputs in the input pipeline.

        Map this method over a dataset. With `prefetch_ids=True`, every step
        then exchanges the ids of the next batch, see
        `DistributedEmbedding.preprocess`. Otherwise inputs are not changed.

        Args:
            inputs: inputs of the layer, see the class.

        Returns:
            The value to pass to the layer as its input.
        """
        if self.prefetch_ids:
            return prefetched_ids.bundle(
                self._ids(inputs), self._layouts(inputs)
            )
        return inputs

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Returns rank and world size of the strategy; (0, 1) without one."""
        if self._collectives is None:
            return 0, 1
        return self._collectives.group.rank, self._collectives.group.world_size

    def _check_same_features(self, features: Sequence[Feature]) -> None:
        """Checks that all ranks place the tables equally; a joint call.

        Raises:
            tf.errors.InvalidArgumentError: on every rank, if a rank has other
                layers, or another placement of a table.
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
        initializer: InitializerLike,
        optimizer: Optimizer | None = None,
        keys: KeyShard | None = None,
        max_norm: float | None = None,
        **kwargs: Any,
    ) -> Variable:
        """Adds the weight that holds this rank's part of a table.

        Args:
            name: the name of the weight.
            spec: this rank's part of the table.
            initializer: a Keras initializer of the entire table.
            optimizer: the optimizer of this table alone; None uses the
                model's optimizer.
            keys: the `KeyShard` of a dynamic vocabulary, otherwise None.
            max_norm: the largest Euclidean norm of a row; None for no limit.
            **kwargs: arguments of `add_weight`.
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
            marks.set_table(variable, self._like_keras)
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

    def save_own_variables(self, store: Store) -> None:
        """Writes entire tables to rank 0's file; a joint call of all ranks.

        Args:
            store: Keras's store of the file, a dict of arrays by name.
        """
        if not self.built:
            return
        for name, variable in self._own_variables().items():
            value: Variable | np.ndarray = variable
            if self._collectives and sharded_variable.is_shard(variable):
                value = whole_tables.gather_to_first(
                    variable, self._collectives
                )
            # Assigned once: an HDF5 file refuses a second value.
            store[name] = value

    def load_own_variables(self, store: Store) -> None:
        """Reads this rank's part of every table.

        Args:
            store: Keras's store of the file, a dict of arrays by name.
        """
        for name, variable in self._own_variables().items():
            if sharded_variable.is_shard(variable):
                whole_tables.assign_part(variable, store[name])
            else:
                variable.assign(store[name])

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        """Sets the weights in order.

        Args:
            weights: one array per weight, of an entire table or of this rank's
                part of it. Anything that can be sliced is accepted, for
                example a memory map.
        """
        whole_tables.set_weights(self, weights)

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
        config: Config = super().get_config()
        config["prefetch_ids"] = self.prefetch_ids
        return config


class OneTable(SparseLayer):
    """Base class of layers with one table, which `sharding` places.

    A subclass implements `describe`, which returns its feature and table. It
    calls `_place` to get this rank's part, and adds the table.

    Args:
        sharding: the name of a placement, a `TablePlacement`, or a
            `TablePlacement`'s config.
        out_of_range: "error" or "ignore", for ids outside of the table.
        max_norm: see `TableConfig`.
        storage: see `TableConfig`.
        **kwargs: arguments of a `SparseLayer`.

    Raises:
        ValueError: if an argument has a value that is not allowed.
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
        # The plan may include the tables of other layers.
        self.plan: ShardingPlan | None = None
        self.plan_given = False
        self.out_of_range = out_of_range
        checks.max_norm(max_norm, where)
        self.max_norm = max_norm
        checks.storage(storage, where)
        self.storage = storage

    @property
    def _is_whole(self) -> bool:
        """Whether the table is an ordinary variable at any number of ranks."""
        return self.sharding in ("data_parallel", "default_device")

    def describe(self, input_shape: Shape) -> FeatureConfig:
        """Returns the layer's feature and table, for the planner.

        Args:
            input_shape: the shape of the layer's input.
        """
        raise NotImplementedError(type(self).__name__)

    def _place(self, input_shape: Shape) -> ShardSpec:
        """Returns this rank's part of the table; a joint call of all ranks."""
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
        self._check_same_features(self._features)
        return self.spec

    def _placement(self) -> TablePlacement:
        asked = self.sharding
        given = asked if isinstance(asked, TablePlacement) else None
        if self._collectives is None:
            return given or TablePlacement.data_parallel()
        if given is not None and self._collectives.gpus.memory is None:
            return given  # neither placement nor storage is left to the plan
        if self.plan is None:
            self.plan = make_plan(
                [self._described], self.wire, self._collectives
            )
            self._collectives.gpus.reserve(self.plan.device_memory)
        return self.plan.placement_of(self.name)

    def lookups(self) -> list[tuple[FeatureConfig, Feature]]:
        """Returns the feature config with the feature that is looked up."""
        return [(self._described, self.feature)]

    def set_placements(
        self, features: Mapping[int, Feature], plan: ShardingPlan
    ) -> None:
        """Takes the new placement of a table that a plan has moved.

        Args:
            features: new features, by the index of their table.
            plan: the plan that has moved the tables.
        """
        self.plan, self.feature = plan, features[0]
        self.spec, self._features = self.feature.spec, [self.feature]

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
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


def product(sizes: Iterable[int | None]) -> int:
    """Returns the product of sizes; sizes that are not known count as 1."""
    return math.prod(size or 1 for size in sizes)


def inner_sizes(input_shape: Shape) -> list[int | None]:
    """Returns the dimensions of an input after the batch dimension."""
    return sparse_inputs.sizes_of(input_shape)[1:]
