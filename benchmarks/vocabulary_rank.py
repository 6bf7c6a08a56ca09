# SPDX-License-Identifier: Apache-2.0
"""The task of a rank: trains fixed and dynamic tables in turns.

Both read the same ids, which are row numbers to one and keys to the other.
"""

from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from benchmarks import loops
from benchmarks import measure
from benchmarks import models
from benchmarks import rank
from benchmarks import training
from benchmarks import workloads
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig


class Variant:
    """A `DistributedEmbedding` of all tables by row, fixed or dynamic."""

    def __init__(
        self,
        strategy: tfdist_ext.HybridParallelStrategy,
        grows: bool,
        ahead: bool,
    ) -> None:
        self.strategy, self._grows, self._ahead = strategy, grows, ahead

    def make_model(self, workload: workloads.Workload) -> models.SparseTower:
        """Builds the model; call inside the strategy's scope."""
        return models.SparseTower(workload, self._feature, self._layer)

    def make_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """Makes the optimizer with fused updates of shards."""
        return tfdist_ext.optimizers.SGD(0.1)

    def make_feature(self, ids: np.ndarray, table: workloads.Table) -> Any:
        """Ids `[n, hotness]` as they are."""
        del table
        return tf.constant(ids)

    def preprocess(self, model: models.SparseTower, features: Any) -> Any:
        """What the input pipeline does to the features of a batch."""
        if not self._ahead:
            return features
        assert model.joined is not None
        return model.joined.preprocess(list(features))

    def exact_lookup(self, layer: Any, feature: Any) -> tf.Tensor:
        """Is not needed: nothing rounds, and nobody asks."""
        raise NotImplementedError

    def _feature(self, table: workloads.Table, index: int) -> Any:
        rows: dict[str, Any] = {"vocabulary_size": table.rows}
        if self._grows:
            # Rows of the same number, and the tenth more that docs advise.
            more = table.rows + table.rows // 10
            rows = {"vocabulary": DynamicVocabulary(more)}
        config = TableConfig(
            f"table{index}",
            embedding_dim=table.width,
            initializer=models.row_initializer(index),
            placement="row_wise",
            **rows,
        )
        shapes = (None, table.hotness), (None, table.width)
        return FeatureConfig(config.name, config, *shapes)

    def _layer(self, features: list[Any]) -> DistributedEmbedding:
        layer = DistributedEmbedding(
            list(features), name="embedding", prefetch_ids=self._ahead
        )
        layer.build()
        return layer


# Kinds of tables: whether they are dynamic, and whether ids are sent ahead.
KINDS = {
    "fixed": (False, False),
    "dynamic": (True, False),
    "fixed, ahead": (False, True),
    "dynamic, ahead": (True, True),
}


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Returns the milliseconds of a step of each kind, in every round."""
    context.barrier("started")
    options = context.options
    strategy = tfdist_ext.HybridParallelStrategy()
    workload = workloads.WORKLOADS[options["workload"]]
    timed = {}
    for name, kind in KINDS.items():
        trainee = loops.Trainee(
            Variant(strategy, *kind),
            workload,
            options["batch"] * context.ranks,
        )
        loop = loops.DatasetLoop(trainee)
        first = training.FIRST_TIMED_STEP
        inputs = trainee.local_inputs(
            context, range(first, first + training.DISTINCT_BATCHES)
        )
        loop.run(inputs, options["warm_up"])
        timed[name] = loop, inputs
    rounds = []
    for turn in range(options["rounds"]):
        found = {}
        for name in sorted(timed, reverse=bool(turn % 2)):
            loop, inputs = timed[name]
            loop.run(inputs, 3)
            context.barrier(f"{name} {turn}")
            before = measure.sample(context.interface)
            loop.run(inputs, options["steps"])
            after = measure.sample(context.interface)
            context.barrier(f"{name} {turn} done")
            found[name] = measure.per_step(before, after, options["steps"])
        rounds.append(found)
    return {"rounds": rounds}
