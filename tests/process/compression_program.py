# SPDX-License-Identifier: Apache-2.0
"""A strategy is created with a compression, the same on all ranks or not.

Usage: compression_program.py WHAT; WHAT is "same" or "different".
"""

import json
import os
import sys

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.compression import TopK

keras = tf.keras


def train(strategy):
    """Trains a dense layer; returns the bytes of its gradients."""
    with strategy.scope():
        model = keras.Sequential([keras.Input([64]), keras.layers.Dense(64)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.ones([8, 64], np.float32)
    model.fit(x, x, batch_size=8, verbose=0)
    return strategy.statistics()["labels"]["gradients"][1]


def main():
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    different = sys.argv[1] == "different"
    compression = TopK(0.02 if different and rank else 0.01)
    try:
        strategy = tfdist_ext.HybridParallelStrategy(compression=compression)
    except tf.errors.InvalidArgumentError as error:
        assert different, error
        for part in ("compression=TopK(share=0.01", "TopK(share=0.02"):
            assert part in str(error), error
        return
    assert not different
    # 65 * 64 values, of which 42 are sent as 8 bytes each.
    assert 42 * 8 <= train(strategy) <= 42 * 8 + 192


if __name__ == "__main__":
    main()
