# SPDX-License-Identifier: Apache-2.0
"""Saves twice; the second time a rank dies on the way.

Usage: crash_while_saving.py FOLDER part|index

`part`: rank 1 dies when it is to write its part, the keys of a vocabulary that
has grown, of the manager's next checkpoint. `index`: rank 0 dies before the new
index takes the place of the old one, all other files of the same path being
written.
"""

import os
import pathlib
import sys

import numpy as np
import tensorflow as tf
from checkpoint_scenarios import data
from checkpoint_scenarios import make_model

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig
from tfdist_ext.ops import vocabulary_ops


class Growing:
    """A layer to which keys come, those of all ranks."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            table = TableConfig(
                "grows", embedding_dim=3, vocabulary=DynamicVocabulary(60)
            )
            feature = FeatureConfig("a", table, (None, 1), (None, 3))
            self.layer = DistributedEmbedding({"a": feature}, name="growing")
            self.layer.build()

    def learn(self, first):
        keys = tf.range(10) + first + 10 * self.strategy.rank
        self.strategy.run(
            lambda ids: self.layer({"a": ids}, training=True),
            args=(tf.cast(keys, tf.int64)[:, tf.newaxis],),
        )


def die_at_part(strategy):
    if strategy.rank == 1:
        # The launcher must not count this death as a failed run.
        vocabulary_ops.export_keys = lambda handle: os._exit(0)


def die_at_index(strategy):
    rename = tf.io.gfile.rename

    def rename_or_die(source, target, overwrite=False):
        if target.endswith(".index"):
            os._exit(0)
        rename(source, target, overwrite)

    tf.io.gfile.rename = rename_or_die


def main():
    folder, point = pathlib.Path(sys.argv[1]), sys.argv[2]
    strategy = tfdist_ext.HybridParallelStrategy(timeout=20)
    model = make_model(strategy, "row")
    growing = Growing(strategy)
    saver = tf.train.Checkpoint(
        model=model, optimizer=model.optimizer, growing=growing.layer
    )
    manager = tf.train.CheckpointManager(
        saver, str(folder / "checkpoints"), max_to_keep=3
    )
    model.fit(data(0, 2), verbose=0)
    growing.learn(100)
    path = manager.save()
    kernel = strategy.gather_table(model.get_layer("sparse"))
    if strategy.rank == 0:
        np.save(folder / "kernel.npy", kernel)
    model.fit(data(2, 2), verbose=0)
    growing.learn(200)
    again = {"part": manager.save, "index": lambda: saver.write(path)}[point]
    {"part": die_at_part, "index": die_at_index}[point](strategy)
    try:
        again()
        raise AssertionError("saved without a rank")
    except tf.errors.UnavailableError as error:
        dead = {"part": 1, "index": 0}[point]
        assert f"rank {dead}" in str(error), error
    os._exit(0)


if __name__ == "__main__":
    main()
