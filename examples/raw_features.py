# SPDX-License-Identifier: Apache-2.0
"""Clicks from raw strings and numbers, in CSV, TFRecord or Parquet files.

python examples/raw_features.py --format csv
tfdist-run -n 2 examples/raw_features.py --format parquet --data day_*.parquet

Keras's preprocessing layers, in the model, turn strings and wide identifiers
into ids of partitioned tables. Without --data it makes files up. All ranks read
all files and train their part of every batch; where reading is what takes the
time, give each its own files by `strategy.distribute_datasets_from_function`.
Parquet needs `pip install pyarrow`.
"""

import argparse
import pathlib
import tempfile

import tensorflow as tf
from command_line import make_parser
from data import tables

import tfdist_ext

keras = tf.keras
layers = keras.layers


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--format", default="csv", choices=tables.READERS, help="of the files")
    add("--data", nargs="+", metavar="FILE", default=[], help="paths")
    add("--rows", type=int, default=6000, help="generated without --data")
    add("--buckets", type=int, default=2**16, help="users are hashed into")
    add("--dim", type=int, default=8, help="columns of the tables")
    add("--epochs", type=int, default=3, help="passes over the data")
    add("--batch-size", type=int, default=200, help="over all ranks")
    return parser.parse_args()


def build_model(
    batches: tf.data.Dataset, buckets: int, dim: int
) -> keras.Model:
    """Raw columns in, the chance of a click out.

    Args:
      batches: What the layers that count or measure adapt to.
      buckets: Users are hashed into as many rows.
      dim: Columns of the tables.
    """
    inputs = {
        name: keras.Input((1,), dtype=dtype, name=name)
        for name, dtype in tables.COLUMNS.items()
        if name != tables.LABEL
    }
    items = layers.IntegerLookup()
    tags = layers.TextVectorization(standardize=None, ragged=True)
    price = layers.Normalization()
    for name, layer in (("item", items), ("tags", tags), ("price", price)):
        layer.adapt(batches.map(lambda batch, _, name=name: batch[name]))
    of_user = tfdist_ext.layers.FullSparse(dim, buckets, use_bias=False)
    of_item = tfdist_ext.layers.Embedding(items.vocabulary_size(), dim)
    of_tags = tfdist_ext.layers.FullSparse(dim, tags.vocabulary_size())
    parts = [
        of_user(layers.Hashing(buckets)(inputs["user"])),
        layers.Flatten()(of_item(items(inputs["item"]))),
        of_tags(tags(inputs["tags"])),
        price(inputs["price"]),
    ]
    hidden = layers.Dense(16, "relu")(layers.Concatenate()(parts))
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(hidden))


def train(arguments: argparse.Namespace) -> None:
    strategy = tfdist_ext.HybridParallelStrategy()
    keras.utils.set_random_seed(0)
    batches = tables.dataset(
        arguments.format, arguments.data, arguments.batch_size
    )
    with strategy.scope():
        model = build_model(batches, arguments.buckets, arguments.dim)
        model.compile(
            tfdist_ext.optimizers.Adagrad(0.1),
            loss="binary_crossentropy",
            metrics=[keras.metrics.AUC(name="auc")],
        )
    verbose = 2 if strategy.rank == 0 else 0
    model.fit(batches, epochs=arguments.epochs, verbose=verbose)


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder:  # Each rank's own.
        if not arguments.data:
            rows = tables.samples(arguments.rows)
            path = pathlib.Path(folder)
            arguments.data = tables.write(arguments.format, path, rows)
        train(arguments)


if __name__ == "__main__":
    main()
