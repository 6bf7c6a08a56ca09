# SPDX-License-Identifier: Apache-2.0
"""Stock ParameterServerStrategy in a custom loop, as a task of its own.

Tables lie in parts on the parameter servers; workers take batches in no order
and update without waiting for each other. So the check gives out one batch at
a time, which is the same as one process; the timed steps are asynchronous.
One step is as many batches as there are workers. Keras 3 knows no parameter
servers, the optimizer is tf_keras's.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from benchmarks import check
from benchmarks import errors
from benchmarks import measure
from benchmarks import models
from benchmarks import rank
from benchmarks import reference
from benchmarks import training
from benchmarks import workloads

_OPTIMIZERS = {
    "sgd": tf_keras.optimizers.SGD,
    "adagrad": tf_keras.optimizers.Adagrad,
}

# Servers wait for phases while others compute: they may look less often.
_SERVER_POLL_SECONDS = 0.02


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Coordinates, or serves, by this rank's role; returns what it measured."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(
        rpc_layer="grpc"
    )
    context.barrier("started")
    if resolver.task_type == "chief":
        return _coordinate(context, resolver)
    config = tf.compat.v1.ConfigProto()
    config.experimental.disable_thread_spinning = True  # as all variants
    server = tf.distribute.Server(
        resolver.cluster_spec(),
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
        config=config,
    )
    context = dataclasses.replace(context, poll_seconds=_SERVER_POLL_SECONDS)
    steps = context.agree("steps", None)
    figures = _measure(context, steps, lambda: None)
    del server  # It had to live until here.
    return figures


def _coordinate(
    context: rank.RankContext,
    resolver: tf.distribute.cluster_resolver.ClusterResolver,
) -> dict[str, Any]:
    options = context.options
    trainee = Trainee(options, resolver)
    alone = dataclasses.replace(context, ranks=1)
    found = check.check(alone, trainee, trainee)
    warm_up, _ = trainee.finish(time.time(), trainee.race(options["warm_up"]))
    steps = context.agree(
        "steps",
        measure.steps_in_budget(
            warm_up[1:] or warm_up, options["seconds"], options["steps"]
        ),
    )
    start, raced = 0.0, []

    def race() -> None:
        nonlocal start, raced
        start, raced = time.time(), trainee.race(steps)

    figures = _measure(context, steps, race)
    seconds, losses = trainee.finish(start, raced)
    if not math.isfinite(np.sum(losses)):
        raise rank.CheckError(f"Loss is not finite after {steps} steps")
    return {
        **figures,
        "steps": steps,
        "step_ms": measure.quantiles_ms(seconds),
        "errors": found,
        "problem": errors.problem(found, "float32"),
        "asynchronous": True,
    }


def _measure(
    context: rank.RankContext, steps: int, work: Callable[[], None]
) -> dict[str, Any]:
    """Counts on every rank what happens while the chief does its `work`."""
    context.barrier("warm")
    before = measure.sample(context.interface)
    context.barrier("counting")
    work()
    context.barrier("timed")
    after = measure.sample(context.interface)
    return {
        "per_step": measure.per_step(before, after, steps),
        "peak_rss_bytes": measure.peak_rss_bytes(),
    }


class Trainee:
    """The model on the parameter servers, and the chief's ways to train it.

    It is both the trainee and the loop that `check.check` asks for.
    """

    def __init__(
        self,
        options: dict[str, Any],
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
    ):
        self.options = options
        self.workload = workloads.WORKLOADS[options["workload"]]
        self.workers = resolver.cluster_spec().num_tasks("worker")
        # Pieces of at least 256 KB, as TensorFlow's guide recommends.
        partitioner = tf.distribute.experimental.partitioners
        self.strategy = tf.distribute.ParameterServerStrategy(
            resolver, partitioner.MinSizePartitioner(max_shards=self.workers)
        )
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(
            self.strategy
        )
        with self.strategy.scope():
            self.tables = [
                _make_variable(
                    f"table{index}",
                    (table.rows, table.width),
                    -models.INITIAL_RANGE,
                    models.INITIAL_RANGE,
                    seed=index,
                )
                for index, table in enumerate(self.workload.tables)
            ]
            self._dense = _make_dense(self.workload)
            self.variables = [
                piece
                for variable in (*self.tables, *self._dense)
                for piece in getattr(variable, "variables", (variable,))
            ]
            self.optimizer = _OPTIMIZERS[options["optimizer"]](
                learning_rate=options["learning_rate"]
            )
            self.optimizer.build(self.variables)
        self._step = tf.function(self._train, autograph=False)
        self._next = tf.function(self._train_next, autograph=False)
        self._iterator = iter(
            self.coordinator.create_per_worker_dataset(self._dataset)
        )

    def rows(self, touched: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Returns one row per id, per table."""
        return tuple(
            tf.nn.embedding_lookup(table, ids).numpy()
            for table, ids in zip(self.tables, touched, strict=True)
        )

    def dense(self) -> tuple[np.ndarray, ...]:
        """Returns the dense variables, in the order of the reference."""
        return tuple(tf.convert_to_tensor(v).numpy() for v in self._dense)

    def local_inputs(
        self, context: rank.RankContext, steps: range
    ) -> list[workloads.Batch]:
        """Makes the batches of `steps`, as if there were one rank."""
        return [self._batch(step, context.rank) for step in steps]

    def run(
        self, inputs: list[workloads.Batch], count: int
    ) -> tuple[list[float], list[float]]:
        """Trains one batch at a time; returns seconds and losses."""
        losses = []

        def step(index: int) -> None:
            batch = inputs[index]
            result = self.coordinator.schedule(
                self._step, args=(batch.ids, batch.labels)
            )
            losses.append(float(result.fetch()[0]))

        return measure.time_steps(step, count), losses

    def race(self, steps: int) -> list[Any]:
        """Every worker trains batch after batch until all are done."""
        results = [
            self.coordinator.schedule(self._next, args=(self._iterator,))
            for _ in range(steps * self.workers)
        ]
        self.coordinator.join()
        return results

    def finish(
        self, start: float, results: list[Any]
    ) -> tuple[list[float], list[float]]:
        """Returns seconds per step and the losses of what was raced.

        A step has ended when as many batches are through as there are workers.
        """
        losses, ends = np.transpose(self.coordinator.fetch(results))
        ends = np.sort(ends)[self.workers - 1 :: self.workers]
        return np.diff(ends, prepend=start).tolist(), losses.tolist()

    def _train(
        self, ids: tuple[tf.Tensor, ...], labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        loss = self.strategy.run(self._replica_step, args=(ids, labels))
        with tf.control_dependencies([loss]):
            return tf.cast(loss, tf.float64), tf.timestamp()

    def _train_next(self, iterator: Any) -> tuple[tf.Tensor, tf.Tensor]:
        return self._train(*next(iterator))

    def _replica_step(
        self, ids: tuple[tf.Tensor, ...], labels: tf.Tensor
    ) -> tf.Tensor:
        with tf.GradientTape() as tape:
            pooled = [
                tf.nn.embedding_lookup_sparse(
                    table, _sparse(feature), None, combiner="sum"
                )
                for table, feature in zip(self.tables, ids, strict=True)
            ]
            dense = [tf.convert_to_tensor(value) for value in self._dense]
            logits = reference.logits(self.workload.head, pooled, dense)
            loss = tf.reduce_mean(
                tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
            )
        gradients = tape.gradient(loss, self.variables)
        pairs = zip(gradients, self.variables, strict=True)
        with tf.control_dependencies([self.optimizer.apply_gradients(pairs)]):
            return tf.identity(loss)

    def _dataset(self) -> tf.data.Dataset:
        first, count = training.FIRST_TIMED_STEP, training.DISTINCT_BATCHES
        batches = [
            self._batch(first + index // self.workers, index % self.workers)
            for index in range(count)
        ]
        ids = tuple(map(np.stack, zip(*(b.ids for b in batches), strict=True)))
        labels = np.stack([batch.labels for batch in batches])
        data = tf.data.Dataset.from_tensor_slices((ids, labels))
        # All workers run the same function: shuffled, their batches differ.
        return data.shuffle(count).repeat().prefetch(2)

    def _batch(self, step: int, member: int) -> workloads.Batch:
        size, seed = self.options["batch"], self.options["seed"]
        return workloads.make_batch(self.workload, size, step, member, seed)


def _sparse(ids: tf.Tensor) -> tf.SparseTensor:
    samples, hotness = ids.shape
    places = np.indices((samples, hotness)).reshape(2, -1).T
    return tf.SparseTensor(places, tf.reshape(ids, [-1]), (samples, hotness))


def _make_dense(workload: workloads.Workload) -> list[tf.Variable]:
    if workload.head == "linear":
        return [_make_variable("bias", (1,), 0.5, 0.5)]
    dense = []
    layers = [layer for tower in workload.layers for layer in tower]
    for index, (inputs, outputs) in enumerate(layers):
        glorot = math.sqrt(6 / (inputs + outputs))
        kernel = (f"kernel{index}", (inputs, outputs), -glorot, glorot)
        dense.append(_make_variable(*kernel, seed=index))
        dense.append(_make_variable(f"bias{index}", (outputs,), 0.5, 0.5))
    return dense


def _make_variable(
    name: str,
    shape: tuple[int, ...],
    low: float,
    high: float,
    seed: int = 0,
) -> tf.Variable:
    """Makes it such that each part is initialized where it lies."""

    def initial_value(
        partition_shape: Any = shape, partition_offset: Any = (0,)
    ) -> tf.Tensor:
        seeds = (seed, partition_offset[0])
        return tf.random.stateless_uniform(partition_shape, seeds, low, high)

    return tf.Variable(initial_value, shape=shape, dtype=tf.float32, name=name)
