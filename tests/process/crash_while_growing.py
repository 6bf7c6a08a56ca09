# SPDX-License-Identifier: Apache-2.0
"""Trains tables that grow, on 2 ranks, until one dies in the middle of a step.

Usage: crash_while_growing.py SAVED FOLDER

Begins at the checkpoint in SAVED and saves after three steps into FOLDER. In
the fifth one rank 1 dies when it has been asked for the rows of keys: others'
keys are under way, its own may have rows by then.
"""

import itertools
import os
import pathlib
import sys

import tensorflow as tf
from vocabulary_cases import compiled
from vocabulary_cases import dataset

import tfdist_ext
from tfdist_ext.ops import vocabulary_ops


def die_in_step(number):
    """Dies when keys have come, of which some are new."""
    answer_keys = vocabulary_ops.answer_keys
    steps = itertools.count(1)

    def die(payload):
        if next(steps) == number:
            # The launcher must not count this death as a failed run.
            os._exit(0)
        return payload

    def answer(vocabularies, payload, splits, **kwargs):
        came = tf.py_function(die, [payload], tf.uint8)
        came.set_shape([None])
        return answer_keys(vocabularies, came, splits, **kwargs)

    vocabulary_ops.answer_keys = answer


class Saves(tf.keras.callbacks.Callback):
    """Writes a checkpoint after three steps."""

    def __init__(self, saver, path):
        super().__init__()
        self.saver, self.path = saver, path

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            self.saver.write(self.path)


def main():
    saved, folder = map(pathlib.Path, sys.argv[1:])
    strategy = tfdist_ext.HybridParallelStrategy(timeout=20)
    if strategy.rank == 1:
        die_in_step(1 + 5)
    with strategy.scope():
        model = compiled(strategy, "adam")
    model.fit(dataset(9, 1), verbose=0)  # makes all that is restored
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    saver.read(str(saved / "adam")).assert_existing_objects_matched()
    try:
        model.fit(
            dataset(7, 7),
            verbose=0,
            callbacks=[Saves(saver, str(folder / "ckpt"))],
        )
        raise AssertionError("trained without a rank")
    except tf.errors.UnavailableError as error:
        assert "rank 1" in str(error) and "all_to_all" in str(error), error
    os._exit(0)


if __name__ == "__main__":
    main()
