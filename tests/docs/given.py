# SPDX-License-Identifier: Apache-2.0
"""What the documents' code takes as given: names that the text speaks of."""

import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig

keras = tf.keras
VALUE = ".ATTRIBUTES/VARIABLE_VALUE"
Names = dict[str, Any]


def feature_configs() -> dict[str, FeatureConfig]:
    users = TableConfig("users", 1000, 8)
    items = TableConfig("items", 500, 8)
    return {
        "user": FeatureConfig("user", users, (None,), (None, 8)),
        "item": FeatureConfig("item", items, (None, 4), (None, 8)),
    }


def samples() -> tf.data.Dataset:
    """Features and labels, not batched."""
    rng = np.random.default_rng(0)
    ids = {"user": rng.integers(0, 1000, 32)}
    ids["item"] = rng.integers(0, 500, (32, 4))
    labels = rng.normal(size=(32, 1)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((ids, labels))


def names(document: str) -> Names:
    """Names that the blocks of a document find; none for a whole program.

    Args:
        document: its path in the repository.
    """
    make = OF_DOCUMENT.get(document)
    if make is None:
        return {}
    strategy = tfdist_ext.HybridParallelStrategy()
    return {
        "np": np,
        "tf": tf,
        "tfdist_ext": tfdist_ext,
        "strategy": strategy,
        **make(strategy),
    }


def checking(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def train_step(batch: Any) -> tf.Tensor:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x) - y)) / 8.0
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    batch = tf.data.Dataset.from_tensors((tf.ones([8, 4]), tf.ones([8, 1])))
    dataset = strategy.experimental_distribute_dataset(batch)
    return {"train_step": train_step, "dataset": dataset}


def checkpoints(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int64"),
                FullSparse(8, 500, name="sparse"),
                keras.layers.Dense(1),
            ]
        )
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        embedding = DistributedEmbedding(feature_configs())
        embedding({"user": tf.constant([1]), "item": tf.constant([[1] * 4])})
    model.save("model.keras")
    folder = pathlib.Path("checkpoints").absolute()
    return {
        "model": model,
        "embedding": embedding,
        "dataset": tf.data.Dataset.from_tensors(
            (tf.ones([8, 4], tf.int64), tf.ones([8, 1]))
        ),
        "folder": str(folder),
        "path": str(folder / "ckpt-1"),
        "name": "optimizer/_trainable_variables/0/" + VALUE,
    }


def data_path(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    return {"features": feature_configs(), "dataset": samples().batch(8)}


def sharding(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    return {
        "feature_configs": feature_configs(),
        "dataset": samples().batch(8),
        "DistributedEmbedding": DistributedEmbedding,
        "FullSparse": FullSparse,
    }


def migrating(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    """No names, but a stand-in for Horovod, which is not installed.

    It says that there is one process, where Horovod changes nothing either.
    """
    keras_module = types.ModuleType("horovod.tensorflow.keras")
    vars(keras_module).update(
        init=lambda: None,
        size=lambda: 1,
        rank=lambda: 0,
        DistributedOptimizer=lambda optimizer: optimizer,
        callbacks=types.SimpleNamespace(
            BroadcastGlobalVariablesCallback=lambda root: (
                keras.callbacks.Callback()
            )
        ),
    )
    for name in ("horovod", "horovod.tensorflow"):
        sys.modules.setdefault(name, types.ModuleType(name))
    sys.modules["horovod"].tensorflow = sys.modules["horovod.tensorflow"]
    sys.modules["horovod.tensorflow"].keras = keras_module
    sys.modules[keras_module.__name__] = keras_module
    return {}


def nothing(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    return {}


def monitoring(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    with strategy.scope():
        inputs = {
            "user": keras.Input([], dtype="int64"),
            "item": keras.Input([4], dtype="int64"),
        }
        layer = DistributedEmbedding(feature_configs(), name="embedding")
        found = layer(inputs)
        hidden = keras.layers.Concatenate()([found["user"], found["item"]])
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    return {"model": model, "dataset": samples().batch(8)}


def streams(strategy: tfdist_ext.HybridParallelStrategy) -> Names:
    names = checkpoints(strategy)
    if strategy.rank == 0:
        pathlib.Path("clicks").mkdir()
        with tf.io.TFRecordWriter("clicks/0.tfrecord") as writer:
            for number in range(100):
                writer.write(np.full(4, number).tobytes())
    if strategy.collectives is not None:
        strategy.collectives.barrier("clicks")

    def parse(records: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        ids = tf.reshape(tf.io.decode_raw(records, tf.int64), [-1, 4])
        return ids, tf.cast(ids[:, :1], tf.float32)

    return {"model": names["model"], "parse": parse}


OF_DOCUMENT: dict[str, Callable[[tfdist_ext.HybridParallelStrategy], Names]] = {
    "docs/checking.md": checking,
    "docs/checkpoints.md": checkpoints,
    "docs/cluster.md": nothing,
    "docs/data_path.md": data_path,
    "docs/migrating.md": migrating,
    "docs/monitoring.md": monitoring,
    "docs/optimizers.md": nothing,
    "docs/sharding.md": sharding,
    "docs/streams.md": streams,
    "docs/tuning.md": sharding,
}
