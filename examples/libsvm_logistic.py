# SPDX-License-Identifier: Apache-2.0
"""Logistic regression on LIBSVM files, the weights spread over the ranks.

python examples/libsvm_logistic.py --train a9a --test a9a.t
tfdist-run -n 4 examples/libsvm_logistic.py --train a9a --test a9a.t

Without files it generates some.
"""

import argparse

import tensorflow as tf
from command_line import SHARDINGS
from command_line import make_parser
from data import libsvm

import tfdist_ext


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--train", nargs="+", metavar="FILE", help="training files")
    add("--test", nargs="+", metavar="FILE", help="test files")
    add("--features", type=int, help="width (default: the largest id)")
    add("--epochs", type=int, default=5, help="passes over the data")
    add("--batch-size", type=int, default=256, help="over all ranks")
    add("--learning-rate", type=float, default=0.1, help="of Adagrad")
    add(
        "--sharding",
        default="row_wise",
        choices=SHARDINGS,
        help="of the weights",
    )
    add("--seed", type=int, default=0, help="of the order of the samples")
    arguments = parser.parse_args()
    if bool(arguments.train) != bool(arguments.test):
        parser.error("give both --train and --test, or neither")
    if not arguments.train:
        arguments.train = [str(libsvm.synthetic_file(20_000, seed=0))]
        arguments.test = [str(libsvm.synthetic_file(5_000, seed=1))]
    return arguments


def build_model(features: int, arguments: argparse.Namespace) -> tf.keras.Model:
    """One weight per feature and a bias: exactly logistic regression."""
    model = tf.keras.Sequential(
        [
            tf.keras.Input((features,), sparse=True),
            tfdist_ext.layers.FullSparse(
                1,
                features,
                activation="sigmoid",
                bias_initializer="zeros",
                sharding=arguments.sharding,
            ),
        ]
    )
    model.compile(
        tfdist_ext.optimizers.Adagrad(arguments.learning_rate),
        loss="binary_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()
    tf.keras.utils.set_random_seed(arguments.seed)
    files = arguments.train + arguments.test
    features = arguments.features or libsvm.count_features(files)
    train = libsvm.dataset(
        arguments.train,
        arguments.batch_size,
        features,
        shuffle=50_000,
        seed=arguments.seed,
    )
    test = libsvm.dataset(arguments.test, arguments.batch_size, features)
    with strategy.scope():
        model = build_model(features, arguments)
    verbose = 2 if strategy.rank == 0 else 0
    model.fit(train, epochs=arguments.epochs, shuffle=False, verbose=verbose)
    scores = model.evaluate(test, verbose=0, return_dict=True)
    if strategy.rank == 0:
        print(f"features: {features}")
        print(f"test loss: {scores['loss']:.4f}")
        print(f"test accuracy: {scores['accuracy']:.4f}")


if __name__ == "__main__":
    main()
