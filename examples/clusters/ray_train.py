# SPDX-License-Identifier: Apache-2.0
"""Trains on two workers of Ray Train, which sets TF_CONFIG for each.

python examples/clusters/ray_train.py
"""

import os
import secrets

from ray.train import ScalingConfig
from ray.train import report
from ray.train.tensorflow import TensorflowTrainer

ROWS = 100


def train(config: dict[str, str]) -> None:
    os.environ["TFDIST_SECRET"] = config["secret"]  # by which ranks meet
    # Ray sets it: tf.keras would be Keras 2 if TensorFlow is not yet imported.
    os.environ.pop("TF_USE_LEGACY_KERAS", None)
    import numpy as np
    import tensorflow as tf

    import tfdist_ext

    ids = np.arange(4096).reshape(1024, 4) % ROWS
    labels = (ids[:, :1] % 2).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(128)
    with tfdist_ext.HybridParallelStrategy() as strategy:
        tf.keras.utils.set_random_seed(0)
        with strategy.scope():
            model = tf.keras.Sequential(
                [
                    tf.keras.Input((4,), dtype="int64"),
                    tfdist_ext.layers.FullSparse(8, ROWS),
                    tf.keras.layers.Dense(1),
                ]
            )
            model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
        history = model.fit(data, epochs=2, verbose=0).history["loss"]
        where = f"rank {strategy.rank} of {strategy.world_size}"
        print(f"rows {ROWS}, {where}: {history}, Keras {tf.keras.__version__}")
    report({"loss": history[-1]})


if __name__ == "__main__":
    trainer = TensorflowTrainer(
        train,
        train_loop_config={"secret": secrets.token_hex(32)},
        scaling_config=ScalingConfig(num_workers=2),
    )
    trainer.fit()
