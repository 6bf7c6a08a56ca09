# SPDX-License-Identifier: Apache-2.0
"""A layer that looks up many embedding tables in one exchange."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding import whole_tables
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.keras_internals import symbolic
from tfdist_ext.layers import sparse_layer
from tfdist_ext.layers.feature_configs import DynamicTables
from tfdist_ext.layers.feature_configs import FeatureConfigs
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Nested
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


@keras.utils.register_keras_serializable(package="tfdist_ext")
class DistributedEmbedding(DynamicTables):
    """Looks up all features of a model, and combines the rows of each sample.

    The counterpart of `keras_rs.layers.DistributedEmbedding`, with the same
    arguments. docs/keras_rs.md describes the differences. Under a
    `HybridParallelStrategy` a plan (`tfdist_ext.plan`) partitions the tables
    over the ranks. All tables share one exchange per direction and step.

    >>> movies = TableConfig("movies", 1000, 8, combiner="mean")
    >>> layer = DistributedEmbedding({
    ...     "seen": FeatureConfig("seen", movies, (None, 5), (None, 8)),
    ...     "movie": FeatureConfig("movie", movies, (None,), (None, 8)),
    ... })
    >>> outputs = layer({
    ...     "seen": tf.constant([[1, 2, 3, 4, 5]]), "movie": tf.constant([7])
    ... })
    >>> outputs["seen"].shape
    TensorShape([1, 8])

    Inputs have the nest of `feature_configs`. Each is of dtype int32 or int64,
    and one of:

    * ids `[batch]` or `[batch, k]`;
    * RaggedTensor of ids `[batch, None]`;
    * SparseTensor `[batch, k]` whose values are ids.

    With a combiner, the rows of the ids in the last dimension are combined.
    With `combiner=None` the output has the row of every id: ids `[batch, k]`
    give `[batch, k, dim]`. Cells of a SparseTensor without an id give zeros.
    Ragged ids give a RaggedTensor `[batch, None, dim]`. If `output_shape`
    has a length, they give a tensor of that length: shorter samples are padded
    with zeros, and longer ones are cut.

    Args:
        feature_configs: nest of `FeatureConfig`. Features with the same
            `TableConfig` share its table.
        table_stacking: an argument of keras-rs; has no effect, because all
            tables share one exchange.
        update_stats: an argument of keras-rs; has no effect, because buffers
            grow as needed.
        plan: a `ShardingPlan` that places the tables. If it was made for
            another number of ranks, `plan.at(world_size)` is used. None makes
            a plan when the layer is built.
        prefetch_ids: whether ids are exchanged one step ahead, see
            `preprocess`.
        **kwargs: arguments of a Keras layer, and the arguments of the wire
            format, see `FullSparse`.

    Raises:
        ValueError: if an argument has a value that is not allowed.
    """

    def __init__(
        self,
        feature_configs: Nested[FeatureConfig],
        *,
        table_stacking: str | Sequence[Nested[str]] | None = "auto",
        update_stats: bool = False,
        plan: ShardingPlan | None = None,
        prefetch_ids: bool = False,
        **kwargs: Any,
    ) -> None:
        wire = Wire.taken_from(kwargs)
        super().__init__(wire=wire, prefetch_ids=prefetch_ids, **kwargs)
        del table_stacking, update_stats
        self._configs = FeatureConfigs.of(feature_configs)
        self._variables: list[Variable] = []
        self.plan = self._given_plan = plan
        self.plan_given = plan is not None

    def build(self, input_shapes: Nest = None) -> None:
        """Creates this rank's part of every table."""
        del input_shapes  # each FeatureConfig has its own
        if getattr(self, "_features", None) is not None:
            return
        self._collectives = collectives_lib.active()
        rank, world_size = self._rank_and_world_size()
        placements = self._placements(world_size)
        specs = [
            ShardSpec.of(
                table.name,
                table.vocabulary_size,
                table.embedding_dim,
                placement,
                rank,
                world_size,
                grows=table.vocabulary is not None,
                storage=sparse_layer.storage_of(
                    table, placement, self.plan, self._collectives
                ),
            )
            for table, placement in zip(
                self._configs.tables, placements, strict=True
            )
        ]
        features = [
            self._feature(config, specs, placements)
            for config in self._configs.features
        ]
        self._check_same_features(features)
        tables = self._configs.tables
        initializers = [
            keras.initializers.get(table.initializer) for table in tables
        ]
        self._add_keys(tables, specs, initializers)
        features = [
            dataclasses.replace(
                feature, keys=self._keys.get(specs[feature.table].table)
            )
            for feature in features
        ]
        self._variables = list(map(self._add, tables, specs, initializers))
        self._features = features
        self.built = True

    def _add(
        self, table: TableConfig, spec: ShardSpec, initializer: InitializerLike
    ) -> Variable:
        variable = self._add_table(
            table.name,
            spec,
            initializer,
            optimizer=self._configs.optimizers.get(table.name),
            keys=self._keys.get(table.name),
            max_norm=table.max_norm,
            dtype=table.dtype,
        )
        # Checkpoints find attributes. Keras 3 hides lists from checkpoints.
        setattr(self, f"table_{table.name}", variable)
        return variable

    def _feature(
        self,
        config: FeatureConfig,
        specs: Sequence[ShardSpec],
        placements: Sequence[TablePlacement],
    ) -> Feature:
        table = self._configs.tables.index(config.table)
        return Feature(
            f"{self.name}/{config.name}",
            table,
            specs[table],
            config.table.combiner or "sum",
            # Keys without a row are looked up with row -1.
            "ignore" if config.table.vocabulary else config.table.out_of_range,
            placements[table].deduplicate,
        )

    def _placements(self, world_size: int) -> list[TablePlacement]:
        """Returns the placements; one process holds every table entirely."""
        if world_size == 1:
            return [TablePlacement.data_parallel()] * len(self._configs.tables)
        assert self._collectives is not None
        if self.plan is None:
            self.plan = sparse_layer.make_plan(
                self._configs.features,
                self.wire,
                self._collectives,
                self._configs.batch_size(world_size),
            )
        if self.plan.world_size != world_size:
            self.plan = self.plan.at(world_size)
        for table in self._configs.tables:
            self.plan.check_fits(table)
        self._collectives.gpus.reserve(self.plan.device_memory)
        return [
            self.plan.placement_of(table.name) for table in self._configs.tables
        ]

    def lookups(self) -> list[tuple[FeatureConfig, Feature]]:
        """Returns the feature configs with the features that are looked up."""
        return list(zip(self._configs.features, self._features, strict=True))

    def table_variables(self) -> list[Variable]:
        """Returns this rank's part of each table, by its `Feature.table`."""
        return self._variables

    def set_placements(
        self, features: Mapping[int, Feature], plan: ShardingPlan
    ) -> None:
        """Takes the new placements of tables that a plan has moved.

        Args:
            features: new features, by the index of their table.
            plan: the plan that has moved the tables.
        """
        self._features = [
            dataclasses.replace(
                feature,
                spec=features[feature.table].spec,
                unique=features[feature.table].unique,
            )
            for feature in self._features
        ]
        if not self.plan_given:
            self.plan = plan

    def call(
        self, inputs: TensorLike, weights: Nest = None, training: bool = False
    ) -> Nest:
        """Looks up every feature.

        Args:
            inputs: nest of ids, see the class, or the result of `preprocess`.
            weights: None, or a nest of numbers with the shapes of the ids.
                Weights of shape `[batch]` apply to all ids of a sample.
            training: whether dynamic vocabularies assign rows to new keys.
                They also do so whenever a gradient tape is recording.

        Returns:
            A nest like `feature_configs`, in the layer's compute dtype. Each
            output is `[batch, embedding_dim]`, or a sequence, see the class.
        """
        if isinstance(inputs, dict) and set(inputs) == {"ids", "weights"}:
            inputs, weights = inputs["ids"], inputs["weights"]
        if is_symbolic_build():
            return self._configs.zeros(inputs, self.name, self.prefetch_ids)
        outputs = self._look_up(inputs, weights, learn=training)
        for output, feature in zip(outputs, self._features, strict=True):
            output.set_shape([None, feature.spec.dim])
        return self._configs.pack(
            [
                id_layout.arranged(tf.cast(rows, self.compute_dtype), each)
                for rows, each in zip(
                    outputs, self._layouts(inputs), strict=True
                )
            ]
        )

    def _ids(self, inputs: TensorLike, weights: Nest = None) -> list[list[Ids]]:
        return self._configs.ids(inputs, weights, self.name)

    def _layouts(self, inputs: TensorLike) -> list[Layout]:
        if prefetched_ids.is_prefetched(inputs):
            return list(inputs.layouts)
        return self._configs.layouts(inputs, self.name)

    def preprocess(
        self, inputs: TensorLike, weights: Nest = None, training: bool = False
    ) -> Nest:
        """Bundles ids and weights into one input of the layer.

        As in keras-rs, this method is mapped over a dataset:

            dataset = dataset.map(lambda x, y: (layer.preprocess(x), y))

        With `prefetch_ids=True`, every step exchanges the ids of the next
        batch while it computes the current one. If a table has a
        `DynamicVocabulary`, it sends the keys of the next batch to their
        owners, and exchanges all ids in their own step. This requires that
        `fit` or `strategy.experimental_distribute_dataset` receives such a
        dataset.
        Results do not change. In Keras 3 the model must be subclassed, because
        Functional models take tensors only.

        Args:
            inputs: nest of ids, see the class.
            weights: None, or a nest of numbers with the shapes of the ids.
            training: not used.

        Returns:
            The value to pass to the layer as its only input.
        """
        del training
        if self.prefetch_ids:
            return prefetched_ids.bundle(
                self._ids(inputs, weights), self._layouts(inputs)
            )
        return (
            inputs if weights is None else {"ids": inputs, "weights": weights}
        )

    def get_embedding_tables(
        self, folder: str | os.PathLike[str] | None = None
    ) -> dict[str, tf.Tensor] | dict[str, str]:
        """Returns the entire tables by name; a joint call of all ranks.

        Without `folder`, every rank needs memory for all tables. Checkpoints
        do not need it.

        Args:
            folder: a folder in which rank 0 writes each table as
                `<name>.npy`, in blocks of rows.

        Returns:
            A dict from table names to tensors `[vocabulary_size,
            embedding_dim]`, or to file paths if `folder` is given.

        Raises:
            ValueError: if the layer is not built.
        """
        variables = self._by_name()
        if folder is None:
            return {
                name: tf.constant(
                    whole_tables.gather(variable, self._collectives)
                )
                for name, variable in variables.items()
            }
        return whole_tables.write_all(variables, self._collectives, folder)

    def set_embedding_tables(self, values: Mapping[str, TensorLike]) -> None:
        """Sets entire tables; each rank reads only the part that it holds.

        Args:
            values: by table name, anything of shape `[vocabulary_size,
                embedding_dim]` that can be sliced, for example
                `np.load(path, mmap_mode="r")`.

        Raises:
            ValueError: if the layer is not built, does not have a table of
                that name, or has it with another shape.
        """
        variables = self._by_name()
        if set(values) - set(variables):
            raise ValueError(
                f"Layer '{self.name}' has the tables {sorted(variables)}. "
                f"Received: {sorted(values)}."
            )
        for name, value in values.items():
            variables[name].assign(value)

    def _own_variables(self) -> dict[str, Variable]:
        return self._by_name()

    def _by_name(self) -> dict[str, Variable]:
        if not self.built:
            raise ValueError(
                f"Layer '{self.name}' has no tables yet: call or build it."
            )
        names = [table.name for table in self._configs.tables]
        return dict(zip(names, self._variables, strict=True))

    @classmethod
    def has_sparsecores(cls) -> bool:
        """Returns False: there are no TPUs with SparseCores (for keras-rs)."""
        return False

    def compute_output_shape(self, input_shapes: Nest, *_: Any) -> Nest:
        """Returns a nest of `(None, embedding_dim)`, or of sequence shapes."""
        del input_shapes
        return self._configs.pack(self._configs.output_shapes)

    def compute_output_spec(
        self, inputs: TensorLike, *_: Any, **__: Any
    ) -> Nest:
        """Returns the symbolic outputs (Keras 3)."""
        return self._configs.pack(
            [
                symbolic(shape, self.compute_dtype, ragged)
                for shape, ragged in self._configs.symbolic(inputs)
            ]
        )

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
        config = super().get_config()
        config.update(self._configs.get_config())
        if self._given_plan is not None:
            config["plan"] = self._given_plan.to_dict()
        config.update(self.wire.arguments())
        return config

    @classmethod
    def from_config(cls, config: Config) -> DistributedEmbedding:
        """Creates the layer from its `get_config`, or from keras-rs's."""
        arguments = dict(config)
        nest = FeatureConfigs.nest_from_config(arguments)
        if "plan" in arguments:
            arguments["plan"] = ShardingPlan.from_dict(arguments["plan"])
        return cls(nest, **arguments)
