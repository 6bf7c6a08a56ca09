# SPDX-License-Identifier: Apache-2.0
"""Rating model of tensorflow-recommenders on MovieLens, any number of ranks.

python examples/movielens.py --data ml-100k
tfdist-run -n 4 examples/movielens.py --data ml-100k

The user and item tables are spread over the ranks. A fifth of the ratings,
drawn at random, is for the test. Without --data it generates ratings.
"""

import argparse
import os
import pathlib

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # What tensorflow-recommenders needs.

import tensorflow as tf
import tensorflow_recommenders as tfrs
from command_line import SHARDINGS
from command_line import make_parser
from data import ratings

import tfdist_ext


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--data", metavar="DIR", help="directory with u.data")
    add("--epochs", type=int, default=15, help="passes over the data")
    add("--batch-size", type=int, default=1000, help="over all ranks")
    add("--dim", type=int, default=32, help="columns of the tables")
    add("--learning-rate", type=float, default=0.005, help="of Adam")
    add("--penalty", type=float, default=0.1, help="on squares of used rows")
    add(
        "--sharding",
        default="row_wise",
        choices=SHARDINGS,
        help="of the tables",
    )
    add("--seed", type=int, default=0, help="of split, order and weights")
    return parser.parse_args()


class RatingModel(tfrs.Model):
    """Score = mean + user's bias + item's bias + user's row x item's row."""

    def __init__(
        self,
        users: int,
        items: int,
        mean: float,
        arguments: argparse.Namespace,
    ) -> None:
        super().__init__()
        # One exchange for all four.
        self.tables = tfdist_ext.layers.SharedExchange(
            [
                _table("user_rows", users, arguments.dim, arguments),
                _table("item_rows", items, arguments.dim, arguments),
                _table("user_bias", users, 1, arguments),
                _table("item_bias", items, 1, arguments),
            ]
        )
        self._mean = mean
        self._penalty = arguments.penalty
        self.task = tfrs.tasks.Ranking(
            loss=tf.keras.losses.MeanSquaredError(
                reduction=tf.keras.losses.Reduction.NONE
            ),
            metrics=[tf.keras.metrics.RootMeanSquaredError(name="rmse")],
        )

    def call(self, features: dict[str, tf.Tensor]) -> tuple[tf.Tensor, ...]:
        """Scores, float32 `[b, 1]`, and penalties of their rows, `[b]`."""
        user, item = features["user"], features["item"]
        user_row, item_row, user_bias, item_bias = self.tables(
            [user, item, user, item]
        )
        biases = user_bias + item_bias
        products = user_row * item_row
        scores = self._mean + biases
        scores += tf.reduce_sum(products, axis=1, keepdims=True)
        rows = tf.concat([user_row, item_row, biases], axis=1)
        return scores, tf.reduce_sum(rows * rows, axis=1)

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        """The mean over this rank's samples; the strategy averages these."""
        scores, penalties = self(inputs, training=training)
        labels = inputs["score"][:, tf.newaxis]
        losses = self.task(labels=labels, predictions=scores)
        if training:
            losses += self._penalty * penalties
        return tf.reduce_mean(losses)


def _table(
    name: str, rows: int, dim: int, arguments: argparse.Namespace
) -> tf.keras.layers.Layer:
    # Rows start at random so that they differ; biases have no need to.
    start = tf.keras.initializers.RandomNormal(
        stddev=0.1 if dim > 1 else 0.0, seed=arguments.seed
    )
    return tfdist_ext.layers.FullSparse(
        dim,
        rows,
        use_bias=False,
        kernel_initializer=start,
        sharding=arguments.sharding,
        name=name,
    )


class PrintErrors(tf.keras.callbacks.Callback):
    """One line per epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
        error, test_error = logs["rmse"], logs["val_rmse"]
        print(f"epoch {epoch + 1}: RMSE {error:.4f}, test {test_error:.4f}")


def read_parts(
    arguments: argparse.Namespace,
) -> tuple[ratings.Ratings, ratings.Ratings]:
    directory = arguments.data or ratings.synthetic_directory()
    known = ratings.read(pathlib.Path(directory) / "u.data")
    return ratings.split(known, test=0.2, seed=arguments.seed)


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()
    tf.keras.utils.set_random_seed(arguments.seed)
    train, test = read_parts(arguments)
    with strategy.scope():
        model = RatingModel(
            users=1 + int(max(train.users.max(), test.users.max())),
            items=1 + int(max(train.items.max(), test.items.max())),
            mean=float(train.scores.mean()),
            arguments=arguments,
        )
        model.compile(tfdist_ext.optimizers.Adam(arguments.learning_rate))
    history = model.fit(
        train.dataset(arguments.batch_size, shuffle=True, seed=arguments.seed),
        validation_data=test.dataset(arguments.batch_size),
        epochs=arguments.epochs,
        callbacks=[PrintErrors()] if strategy.rank == 0 else [],
        verbose=0,
    ).history
    if strategy.rank == 0:
        print(f"test RMSE: {history['val_rmse'][-1]:.4f}")


if __name__ == "__main__":
    main()
