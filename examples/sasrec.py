# SPDX-License-Identifier: Apache-2.0
"""Self-attentive sequential recommendation (SASRec), any number of ranks.

python examples/sasrec.py --data ml-100k
tfdist-run -n 4 examples/sasrec.py --data ml-100k

Learns which item a user rates next. The table of items is spread over the
ranks, and scores are products with rows of the same table. Prints how often the
right item is among the first ten of 101. Without --data it generates ratings.
"""

import argparse
import pathlib

import numpy as np
import tensorflow as tf
from command_line import SHARDINGS
from command_line import make_parser
from data import histories
from data import ratings

import tfdist_ext

keras = tf.keras


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", help="directory with u.data")
    add("--epochs", type=int, default=40, help="passes over the data")
    add("--batch-size", type=int, default=64, help="users, over all ranks")
    add("--length", type=int, default=50, help="items of a history")
    add("--dim", type=int, default=32, help="columns of the tables")
    add("--blocks", type=int, default=2, help="layers of attention")
    add("--learning-rate", type=float, default=0.002, help="of Adam")
    add("--sharding", default="auto", choices=SHARDINGS, help="of the items")
    add("--seed", type=int, default=0, help="of negatives, order and weights")
    return parser.parse_args()


class Block(keras.layers.Layer):
    """Attention to earlier items, then a network at each place."""

    def __init__(self, dim: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.supports_masking = True
        self.before = keras.layers.LayerNormalization()
        self.attend = keras.layers.MultiHeadAttention(2, dim // 2)
        self.between = keras.layers.LayerNormalization()
        self.inner = keras.layers.Dense(dim, "relu")
        self.outer = keras.layers.Dense(dim)
        self.dropout = keras.layers.Dropout(dropout)

    def call(
        self, rows: tf.Tensor, mask: tf.Tensor, training: bool = False
    ) -> tf.Tensor:
        seen = mask[:, tf.newaxis, :]
        near = self.before(rows)
        found = self.attend(
            near, rows, attention_mask=seen, use_causal_mask=True
        )
        rows += self.dropout(found, training=training)
        inner = self.outer(self.inner(self.between(rows)))
        return rows + self.dropout(inner, training=training)


class SasRec(keras.Model):
    """Scores of items after each item of a history."""

    def __init__(self, items: int, arguments: argparse.Namespace) -> None:
        super().__init__()
        start = keras.initializers.RandomNormal(
            stddev=arguments.dim**-0.5, seed=arguments.seed
        )
        # The one difference from a model of one process.
        self.items = tfdist_ext.layers.Embedding(
            items,
            arguments.dim,
            embeddings_initializer=start,
            mask_zero=True,
            sharding=arguments.sharding,
        )
        self.places = keras.layers.Embedding(arguments.length, arguments.dim)
        self.blocks = [Block(arguments.dim) for _ in range(arguments.blocks)]
        self.norm = keras.layers.LayerNormalization()

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Scores `[b, length, 2]`, or `[b, candidates]` after the last item."""
        history = inputs["history"]
        mask = tf.not_equal(history, 0)
        rows = self.items(history) + self.places(tf.range(history.shape[1]))
        for block in self.blocks:
            rows = block(rows, mask=mask)
        states = self.norm(rows)
        if "candidates" in inputs:
            found = self.items(inputs["candidates"])
            return tf.einsum("bd,bcd->bc", states[:, -1], found)
        both = tf.stack([inputs["positive"], inputs["negative"]], axis=-1)
        scores = tf.einsum("bld,blcd->blc", states, self.items(both))
        # What is before the first item does not count in the loss.
        scores._keras_mask = mask
        return scores


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()
    keras.utils.set_random_seed(arguments.seed)
    directory = arguments.data or ratings.synthetic_directory()
    known = histories.read(pathlib.Path(directory) / "u.data", arguments.length)
    with strategy.scope():
        model = SasRec(known.count, arguments)
        model.compile(
            tfdist_ext.optimizers.Adam(arguments.learning_rate),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
    history = model.fit(
        known.train(arguments.batch_size, arguments.seed),
        epochs=arguments.epochs,
        steps_per_epoch=-(-len(known.items) // arguments.batch_size),
        verbose=0,
    ).history
    test = known.test(arguments.batch_size, arguments.seed)
    scores = model.predict(test, verbose=0)
    better = np.sum(scores[:, 1:] >= scores[:, :1], axis=1)
    if strategy.rank == 0:
        print(f"loss: {history['loss'][0]:.4f} to {history['loss'][-1]:.4f}")
        print(f"among the first ten: {np.mean(better < 10):.4f}")


if __name__ == "__main__":
    main()
