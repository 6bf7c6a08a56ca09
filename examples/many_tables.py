# SPDX-License-Identifier: Apache-2.0
"""Three features, two tables, one exchange: plans, prefetched ids.

python examples/many_tables.py
tfdist-run -n 2 examples/many_tables.py --prefetch-ids
tfdist-run -n 2 examples/many_tables.py --placement row_wise --plan plan.json

The first run with --plan writes the file, later ones place tables by it.
"""

import argparse
import pathlib

import numpy as np
import tensorflow as tf
from command_line import make_parser

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

USERS, MOVIES, SAMPLES = 300_000, 90_000, 50_000
PLACEMENTS = ("auto", "table_wise", "row_wise", "column_wise", "grid")


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--epochs", type=int, default=2, help="passes over the data")
    add("--batch-size", type=int, default=500, help="over all ranks")
    add("--placement", default="auto", choices=PLACEMENTS, help="of the tables")
    add("--plan", type=pathlib.Path, help="file with the plan")
    add("--prefetch-ids", action="store_true", help="send ids a step ahead")
    return parser.parse_args()


class Clicks(tf.keras.Model):
    """Probability of a click, from a user, a movie and movies seen before."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        placement = arguments.placement
        users = TableConfig("users", USERS, 16, placement=placement)
        movies = TableConfig(
            "movies", MOVIES, 32, combiner="mean", placement=placement
        )
        batch = arguments.batch_size
        features = {  # Two of them share a table.
            "user": FeatureConfig("user", users, (batch,), (batch, 16)),
            "movie": FeatureConfig("movie", movies, (batch,), (batch, 32)),
            "seen": FeatureConfig("seen", movies, (batch, 20), (batch, 32)),
        }
        plan = None
        if arguments.plan and arguments.plan.exists():
            plan = tfdist_ext.ShardingPlan.load(arguments.plan)
        self.embedding = DistributedEmbedding(
            features, plan=plan, prefetch_ids=arguments.prefetch_ids
        )
        self.top = tf.keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
        """Probabilities, float32 `[b, 1]`."""
        found = tf.nest.flatten(self.embedding(inputs))
        return self.top(tf.concat(found, axis=1))


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()  # Before any tensor.
    tf.keras.utils.set_random_seed(0)

    rng = np.random.default_rng(0)
    ids = {
        "user": rng.integers(0, USERS, SAMPLES),
        # Popular ids are small ones, as Keras's lookup layers number words.
        "movie": rng.zipf(1.2, SAMPLES) % MOVIES,
        "seen": rng.zipf(1.2, (SAMPLES, 20)) % MOVIES,
    }
    likes = rng.normal(size=MOVIES)
    labels = likes[ids["movie"]] + likes[ids["seen"]].mean(axis=1) > 0
    data = tf.data.Dataset.from_tensor_slices((ids, labels[:, None]))
    data = data.batch(arguments.batch_size)

    with strategy.scope():
        model = Clicks(arguments)
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "binary_crossentropy")
    layer = model.embedding
    data = data.map(lambda x, y: (layer.preprocess(x), y))
    model.fit(data, epochs=arguments.epochs, shuffle=False, verbose=2)

    if layer.plan and strategy.rank == 0:
        print(layer.plan.summary())
        if arguments.plan and not arguments.plan.exists():
            layer.plan.save(arguments.plan)


if __name__ == "__main__":
    main()
