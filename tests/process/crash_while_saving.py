# SPDX-License-Identifier: Apache-2.0
"""Saves twice; the second time rank 1 dies with its part half written.

Usage: crash_while_saving.py FOLDER
"""

import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from checkpoint_program import data
from checkpoint_program import make_model

import tfdist_ext


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = tfdist_ext.HybridParallelStrategy(timeout=20)
    model = make_model(strategy, "row")
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(
        saver, str(folder / "checkpoints"), max_to_keep=3
    )
    model.fit(data(0, 2), verbose=0)
    manager.save()
    kernel = strategy.gather_table(model.get_layer("sparse"))
    if strategy.rank == 0:
        np.save(folder / "kernel.npy", kernel)
    model.fit(data(2, 2), verbose=0)
    if strategy.rank == 1:
        variable = model.get_layer("sparse").kernel
        variable = getattr(variable, "_value", variable)
        # The launcher must not count this death as a failed run.
        variable._serialize_to_tensors = lambda: os._exit(0)
    try:
        manager.save()
        raise AssertionError("saved without rank 1")
    except tf.errors.UnavailableError as error:
        assert "rank 1" in str(error), error
    os._exit(0)


if __name__ == "__main__":
    main()
