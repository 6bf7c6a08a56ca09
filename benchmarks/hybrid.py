# SPDX-License-Identifier: Apache-2.0
"""Ours: partitioned FullSparse layers under HybridParallelStrategy."""

import dataclasses
import functools
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import models
from benchmarks import workloads
from tfdist_ext.tables import plan as sharding_plan
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

_PLACEMENTS = {
    "row": "row_wise",
    "column": "column_wise",
    "table": "table_wise",
    "grid": "grid",
    "replicated": "data_parallel",
    "auto": "auto",
}
_OPTIMIZERS = {
    "sgd": tfdist_ext.optimizers.SGD,
    "adagrad": tfdist_ext.optimizers.Adagrad,
}


class HybridVariant:
    """HybridParallelStrategy; every rank holds a shard of every table."""

    def __init__(
        self,
        options: dict[str, Any],
        ranks: int,
        strategy: tfdist_ext.HybridParallelStrategy | None = None,
    ):
        del ranks  # The strategy reads TF_CONFIG.
        self.options = options
        self.strategy = strategy or tfdist_ext.HybridParallelStrategy(
            gradient_dtype=options["gradient_dtype"]
        )

    def make_model(self, workload: workloads.Workload) -> models.SparseTower:
        """Builds the model; call inside the strategy's scope."""
        if self.plain:
            make = functools.partial(self._make_layer, None)
            return models.SparseTower(workload, make)
        plan = self._plan(workload)
        return models.SparseTower(
            workload,
            functools.partial(self._make_layer, plan),
            functools.partial(
                tfdist_ext.layers.SharedExchange,
                prefetch_ids=self.options["prefetch_ids"],
            ),
        )

    @property
    def plain(self) -> bool:
        """Whether layers are left to themselves, as most users leave them."""
        return bool(self.options["sharding"] == "plain")

    def _plan(self, workload: workloads.Workload) -> ShardingPlan:
        """Places all tables together, as the variant says."""
        placement, _, how = self.options["sharding"].partition("-")
        features = []
        for index, table in enumerate(workload.tables):
            config = TableConfig(
                f"table{index}",
                table.rows,
                table.width,
                combiner="sum",
                placement=_PLACEMENTS[placement],
                deduplicate=True if how == "dedup" else None,
            )
            shapes = (None, table.hotness), (None, table.width)
            features.append(
                FeatureConfig(
                    config.name, config, *shapes, unique=self._unique(table)
                )
            )
        return sharding_plan.plan(
            [feature.table for feature in features],
            features,
            self.strategy.num_replicas_in_sync,
            batch_size=self.options["batch"],
        )

    def _unique(self, table: workloads.Table) -> float | None:
        """Distinct ids of a batch, where the planner would assume others."""
        if table.exponent == workloads.ZIPF_EXPONENT:
            return None
        generator = np.random.default_rng(self.options["seed"] + 1)
        ids = workloads.draw_ids(generator, self.options["batch"], table)
        return float(len(np.unique(ids)))

    def make_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """Makes the optimizer with fused updates of shards."""
        return _OPTIMIZERS[self.options["optimizer"]](
            learning_rate=self.options["learning_rate"]
        )

    def make_feature(
        self, ids: np.ndarray, table: workloads.Table
    ) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
        """Turns ids `[n, hotness]` into the kind of input asked for."""
        kind = self.options["input"]
        if kind == "ids":
            return tf.constant(ids)
        samples, hotness = ids.shape
        if kind == "ragged":
            return tf.RaggedTensor.from_row_splits(
                ids.reshape(-1), np.arange(samples + 1) * hotness
            )
        sample = np.repeat(np.arange(samples), hotness)
        places = np.stack([sample, np.sort(ids, axis=1).reshape(-1)], axis=1)
        return tf.SparseTensor(
            places, tf.ones(len(places)), (samples, table.rows)
        )

    def preprocess(
        self, model: models.SparseTower, features: tuple[Any, ...]
    ) -> Any:
        """What the input pipeline does to the features of a batch."""
        return model.joined.preprocess(features) if model.joined else features

    def exact_lookup(
        self, layer: tf.keras.layers.Layer, feature: Any
    ) -> tf.Tensor:
        """Calls a sparse layer with fp32 on the wire, whatever is timed."""
        wire = layer.wire
        layer.wire = dataclasses.replace(wire, dtype="float32")
        try:
            return layer(feature)
        finally:
            layer.wire = wire

    def _make_layer(
        self, plan: ShardingPlan | None, table: workloads.Table, index: int
    ) -> tf.keras.layers.Layer:
        layer = tfdist_ext.layers.FullSparse(
            table.width,
            input_dim=table.rows,
            sharding=plan.placement_of(f"table{index}") if plan else "auto",
            wire_dtype=self.options["wire_dtype"],
            wire_packing=self.options["wire_packing"],
            kernel_initializer=models.row_initializer(index),
            use_bias=False,
            binary_values=True,
            name=f"table{index}",
        )
        layer.build((None, table.hotness))
        return layer
