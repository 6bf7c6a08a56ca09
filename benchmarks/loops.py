# SPDX-License-Identifier: Apache-2.0
"""Ways to run training steps: custom loops and Keras `fit`."""

import functools
import time
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import Protocol

import numpy as np
import tensorflow as tf

from benchmarks import measure
from benchmarks import models
from benchmarks import rank
from benchmarks import workloads

# Per-table inputs and the labels of one rank's batch.
Inputs = tuple[tuple[Any, ...], tf.Tensor]


class Variant(Protocol):
    """A strategy with the layers and the optimizer that go with it."""

    strategy: tf.distribute.Strategy

    def make_model(self, workload: workloads.Workload) -> models.SparseTower:
        """Builds the model; called inside the strategy's scope."""

    def make_optimizer(self) -> tf.keras.optimizers.Optimizer:
        """Makes the optimizer; called inside the strategy's scope."""

    def make_feature(self, ids: np.ndarray, table: workloads.Table) -> Any:
        """Turns ids `[n, hotness]` into what the sparse layer takes."""

    def exact_lookup(
        self, layer: tf.keras.layers.Layer, feature: Any
    ) -> tf.Tensor:
        """Calls a sparse layer such that nothing rounds its results."""


class Trainee:
    """A variant's model and optimizer, built for one workload."""

    def __init__(
        self,
        variant: Variant,
        workload: workloads.Workload,
        global_batch_size: int,
    ):
        self.variant = variant
        self.workload = workload
        self.global_batch_size = global_batch_size
        with variant.strategy.scope():
            self.model = variant.make_model(workload)
            self.model.build()
            self.optimizer = variant.make_optimizer()
            self.optimizer.build(self.model.trainable_variables)
        lookups = map(self._replicated, self.model.sparse_layers)
        # Tables that a function looks up in stay where they are; those of
        # plain layers go to other places when `fit` starts.
        if not getattr(variant, "plain", False):
            lookups = (tf.function(f, autograph=False) for f in lookups)
        self._lookups = list(lookups)

    def inputs(self, batch: workloads.Batch) -> Inputs:
        """Turns a batch into tensors, once, outside the timed steps."""
        pairs = zip(batch.ids, self.workload.tables, strict=True)
        features = tuple(self.variant.make_feature(*pair) for pair in pairs)
        return features, tf.constant(batch.labels)

    def local_inputs(
        self, context: rank.RankContext, steps: range
    ) -> list[Inputs]:
        """Makes this rank's batches of `steps`."""
        size, seed = context.options["batch"], context.options["seed"]
        return [
            self.inputs(
                workloads.make_batch(
                    self.workload, size, step, context.rank, seed
                )
            )
            for step in steps
        ]

    def distributed(
        self, inputs: list[Inputs]
    ) -> tf.distribute.DistributedDataset:
        """Returns a dataset that repeats batches of this rank."""
        parts = [tf.data.Dataset.from_tensors(batch) for batch in inputs]
        whole = functools.reduce(tf.data.Dataset.concatenate, parts).repeat()
        variant, model = self.variant, self.model
        if hasattr(variant, "preprocess"):  # stock has nothing like it
            whole = whole.map(lambda x, y: (variant.preprocess(model, x), y))
        return variant.strategy.distribute_datasets_from_function(
            lambda _: whole
        )

    def dense(self) -> tuple[np.ndarray, ...]:
        """Returns the dense variables, in the order of the reference."""
        return tuple(
            np.asarray(variable.numpy())
            for variable in self.model.dense_variables
        )

    def rows(self, touched: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Looks up one row per id, per table: what the model really holds.

        A collective under our strategy: every rank calls it.
        """
        return tuple(
            self._lookup(index, ids) for index, ids in enumerate(touched)
        )

    def _lookup(self, index: int, ids: np.ndarray) -> np.ndarray:
        table = self.workload.tables[index]
        rows = self._lookups[index](
            self.variant.make_feature(ids[:, None], table)
        )
        strategy = self.variant.strategy
        return strategy.experimental_local_results(rows)[0].numpy()

    def _replicated(self, layer: tf.keras.layers.Layer) -> Callable[..., Any]:
        variant = self.variant

        def replica(feature: Any) -> tf.Tensor:
            return variant.exact_lookup(layer, feature)

        return lambda feature: variant.strategy.run(replica, args=(feature,))


class CustomLoop:
    """`strategy.run` of a replica step inside one `tf.function`."""

    def __init__(self, trainee: Trainee):
        self.trainee = trainee
        self.step = tf.function(self._step)

    def run(
        self, inputs: list[Inputs], count: int
    ) -> tuple[list[float], list[float]]:
        """Runs `count` steps, cycling; returns seconds and local losses."""
        losses = []

        def step(index: int) -> None:
            losses.append(float(self.step(*inputs[index % len(inputs)])))

        return measure.time_steps(step, count), losses

    def _step(self, features: tuple[Any, ...], labels: tf.Tensor) -> tf.Tensor:
        strategy = self.trainee.variant.strategy
        loss = strategy.run(self._replica_step, args=(features, labels))
        return strategy.experimental_local_results(loss)[0]

    def _replica_step(
        self, features: tuple[Any, ...], labels: tf.Tensor
    ) -> tf.Tensor:
        model, optimizer = self.trainee.model, self.trainee.optimizer
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(entropy) / self.trainee.global_batch_size
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss


class DatasetLoop(CustomLoop):
    """A custom loop that reads its batches from a distributed dataset."""

    def __init__(self, trainee: Trainee):
        super().__init__(trainee)
        self._inputs: list[Inputs] = []
        self._batches: Iterator[Inputs] = iter([])

    def run(
        self, inputs: list[Inputs], count: int
    ) -> tuple[list[float], list[float]]:
        """Runs `count` steps; the same `inputs` go on where they were."""
        if inputs is not self._inputs:
            self._inputs = inputs
            self._batches = iter(self.trainee.distributed(inputs))
        losses = []

        def step(index: int) -> None:
            del index
            losses.append(float(self.step(*next(self._batches))))

        return measure.time_steps(step, count), losses


class FitLoop:
    """`model.fit` without validation, metrics or progress bar.

    Attributes:
        callbacks: whose time counts.
        cpu_seconds: of this process in each step of the last run.
    """

    def __init__(self, trainee: Trainee):
        self.trainee = trainee
        self.callbacks: list[tf.keras.callbacks.Callback] = []
        self.cpu_seconds: list[float] = []
        with trainee.variant.strategy.scope():
            trainee.model.compile(
                optimizer=trainee.optimizer,
                loss=tf.keras.losses.BinaryCrossentropy(from_logits=True),
            )

    def run(
        self, inputs: list[Inputs], count: int
    ) -> tuple[list[float], list[float]]:
        """Fits on `count` batches, cycling; returns seconds per step.

        `fit` reports only averages over an epoch: there are no local losses.
        """
        timer = StepTimer()
        self.trainee.model.fit(
            self.trainee.distributed(inputs),
            epochs=1,
            steps_per_epoch=count,
            verbose=0,
            callbacks=[*self.callbacks, timer],
        )
        self.cpu_seconds = timer.cpu_seconds
        return timer.seconds, []


class StepTimer(tf.keras.callbacks.Callback):
    """Seconds from the end of a step to the end of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock."""
        self.last = time.perf_counter()
        self.last_cpu = time.process_time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes the time; reading the loss waits for the step."""
        if logs and "loss" in logs:
            float(logs["loss"])
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now
        now = time.process_time()
        self.cpu_seconds.append(now - self.last_cpu)
        self.last_cpu = now


LOOPS = {"custom": CustomLoop, "dataset": DatasetLoop, "fit": FitLoop}
