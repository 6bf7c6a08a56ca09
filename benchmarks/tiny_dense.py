# SPDX-License-Identifier: Apache-2.0
"""The task of a rank in `overhead`: steps of a tiny dense Keras model.

The model computes next to nothing: what a step takes is what strategy and
training loop cost.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import loops
from benchmarks import measure
from benchmarks import rank

_FEATURES = 8
_BATCH_PER_RANK = 32
_BATCHES = 50


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Returns quantiles of this rank's step times and the bytes per step.

    Raises:
        rank.CheckError: the weights after the steps differ between ranks.
    """
    options = context.options
    context.barrier("started")
    strategy = _make_strategy(options["strategy"])
    with strategy.scope():
        model = _make_model()
    steps = _STEPS[options["loop"]](strategy, model, _dataset(context.ranks))
    steps(options["warm_up"])
    context.barrier("warm")
    before = measure.sample(context.interface)
    seconds = steps(options["steps"])
    context.barrier("timed")
    after = measure.sample(context.interface)
    _check_equal(context, model)
    return {
        "step_ms": measure.quantiles_ms(seconds),
        "per_step": measure.per_step(before, after, options["steps"]),
    }


def _make_strategy(name: str) -> tf.distribute.Strategy:
    if name == "hybrid":
        import tfdist_ext

        return tfdist_ext.HybridParallelStrategy()
    if name == "stock":
        return tf.distribute.MultiWorkerMirroredStrategy()
    return tf.distribute.get_strategy()


def _make_model() -> tf.keras.Model:
    model = tf.keras.Sequential(
        [
            tf.keras.Input((_FEATURES,)),
            tf.keras.layers.Dense(16, activation="relu"),
            tf.keras.layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=tf.keras.optimizers.SGD(0.01), loss="mse", metrics=["mae"]
    )
    return model


def _dataset(ranks: int) -> tf.data.Dataset:
    """Global batches, the same data on every rank; users write it so."""
    generator = np.random.default_rng(0)
    samples = _BATCHES * _BATCH_PER_RANK * ranks
    x = generator.random((samples, _FEATURES)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).cache()
    return dataset.batch(_BATCH_PER_RANK * ranks).repeat()


Steps = Callable[[int], list[float]]


def _fit_steps(
    strategy: tf.distribute.Strategy,
    model: tf.keras.Model,
    dataset: tf.data.Dataset,
) -> Steps:
    def run(count: int) -> list[float]:
        timer = loops.StepTimer()
        model.fit(
            dataset,
            epochs=1,
            steps_per_epoch=count,
            verbose=0,
            callbacks=[timer],
        )
        # The first includes what starts an epoch: iterator and tracing.
        return timer.seconds[1:]

    return run


def _custom_steps(
    strategy: tf.distribute.Strategy,
    model: tf.keras.Model,
    dataset: tf.data.Dataset,
) -> Steps:
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    replicas = strategy.num_replicas_in_sync
    variables = model.trainable_variables

    def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            error = model(x, training=True) - y
            loss = tf.reduce_mean(tf.square(error)) / replicas
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def step(batches: Any) -> tf.Tensor:
        loss = strategy.run(replica_step, args=next(batches))
        return strategy.experimental_local_results(loss)[0]

    return lambda count: measure.time_steps(
        lambda _: float(step(iterator)), count
    )


_STEPS = {"fit": _fit_steps, "custom": _custom_steps}


def _check_equal(context: rank.RankContext, model: tf.keras.Model) -> None:
    """Dense weights of all ranks must be bitwise those of rank 0."""
    mine = [variable.numpy().tolist() for variable in model.weights]
    if mine != context.agree("weights", mine):
        raise rank.CheckError(
            f"Rank {context.rank} has other dense weights than rank 0"
        )
