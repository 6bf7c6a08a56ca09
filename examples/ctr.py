# SPDX-License-Identifier: Apache-2.0
"""Click prediction on raw Criteo logs: hashed FullSparse and a dense tower.

python examples/ctr.py --data train.txt
tfdist-run -n 2 examples/ctr.py --data day_0.gz day_1.gz --buckets 4194304

Kaggle's train.txt and the days of the log of 1 TB have one format. Without
--data it generates a log of that format from a known truth, which lets a model
reach an AUC of about 0.8. Every tenth line is for validation.
"""

import argparse

import tensorflow as tf
from command_line import SHARDINGS
from command_line import WIRE_DTYPES
from command_line import make_parser
from data import criteo
from data import synthetic_criteo
from report import Meter
from report import StockTraffic
from report import plot
from report import table
from report import unique_rows

import tfdist_ext

# Optimizers and the learning rates that suit them here.
OPTIMIZERS = {
    "Adam": 0.0005,
    "SGD": 1.0,
    "Adagrad": 0.05,
    "RowWiseAdagrad": 0.05,
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    _add_input_arguments(parser.add_argument_group("input"))
    _add_model_arguments(parser.add_argument_group("model and training"))
    _add_output_arguments(parser.add_argument_group("output"))
    arguments = parser.parse_args()
    if arguments.learning_rate is None:
        arguments.learning_rate = OPTIMIZERS[arguments.optimizer]
    arguments.cross = [cross.split("*") for cross in arguments.cross]
    unknown = {f for cross in arguments.cross for f in cross}
    unknown -= set(criteo.FIELDS)
    if unknown:
        parser.error(f"--cross names no field: {', '.join(sorted(unknown))}")
    if not arguments.data:
        path = synthetic_criteo.click_log(arguments.rows, arguments.seed)
        arguments.data = [str(path)]
    return arguments


def _add_input_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--data", nargs="+", metavar="FILE", default=[], help="Criteo TSV, .gz")
    add("--rows", type=int, default=200_000, help="generated without --data")
    add("--shuffle", type=int, default=50_000, help="lines shuffled at a time")
    add("--seed", type=int, default=0, help="of data, order and weights")
    add(
        "--cross",
        action="append",
        metavar="C1*C2",
        default=[],
        help="hash these fields together as well; may be repeated",
    )


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--buckets", type=int, default=2**20, help="rows of the table")
    add("--units", type=int, default=32, help="columns of the table")
    add("--epochs", type=int, default=2, help="passes over the data")
    add("--batch-size", type=int, default=2048, help="over all ranks")
    add("--optimizer", default="Adam", choices=OPTIMIZERS, help="rule")
    add("--learning-rate", type=float, help="(default: suits --optimizer)")
    add("--sharding", default="auto", choices=SHARDINGS, help="of the table")
    add(
        "--wire-dtype",
        default="float32",
        choices=WIRE_DTYPES,
        help="of the results and gradients sent between ranks",
    )


def _add_output_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--report", default="report.png", help="plot written at the end")
    add("--export", metavar="FOLDER", help="exports the model to serve it")
    add(
        "--table-dtype",
        default="float32",
        choices=("float32", "bfloat16", "int8"),
        help="of the exported table",
    )
    add("--backup-dir", help="resume from here after an interruption")


def build_model(arguments: argparse.Namespace) -> tf.keras.Model:
    """Pooled rows of the hashed ids, joined with the numbers, then an MLP."""
    hotness = len(criteo.FIELDS) + len(arguments.cross)
    ids = tf.keras.Input((hotness,), dtype="int64", name="ids")
    numbers = tf.keras.Input((len(criteo.INTEGERS),), name="numbers")
    sparse = tfdist_ext.layers.FullSparse(
        arguments.units,
        arguments.buckets,
        binary_values=True,
        sharding=arguments.sharding,
        wire_dtype=arguments.wire_dtype,
        name="hashed",
    )
    joined = tf.keras.layers.Concatenate()([sparse(ids), numbers])
    hidden = tf.keras.layers.Dense(64, activation="relu")(joined)
    hidden = tf.keras.layers.Dense(32, activation="relu")(hidden)
    click = tf.keras.layers.Dense(1, activation="sigmoid")(hidden)
    model = tf.keras.Model({"ids": ids, "numbers": numbers}, click)
    optimizer = getattr(tfdist_ext.optimizers, arguments.optimizer)
    model.compile(
        optimizer(arguments.learning_rate),
        loss="binary_crossentropy",
        metrics=[tf.keras.metrics.AUC(name="auc")],
    )
    return model


def dataset(
    arguments: argparse.Namespace, *, validation: bool
) -> tf.data.Dataset:
    return criteo.dataset(
        arguments.data,
        arguments.batch_size,
        arguments.buckets,
        validation=validation,
        crosses=arguments.cross,
        shuffle=0 if validation else arguments.shuffle,
        seed=arguments.seed,
    )


def stock_traffic(
    model: tf.keras.Model, world_size: int, arguments: argparse.Namespace
) -> StockTraffic:
    """What replicating the table instead of sharding it would send."""
    batches = dataset(arguments, validation=False)
    dense = [
        weight
        for layer in model.layers
        if layer.name != "hashed"
        for weight in layer.trainable_weights
    ]
    return StockTraffic(
        world_size=world_size,
        rows=arguments.buckets,
        dim=arguments.units,
        unique_rows=unique_rows(batches, world_size),
        dense_weights=sum(weight.shape.num_elements() for weight in dense),
    )


def served_auc(arguments: argparse.Namespace) -> float:
    """What the exported model reaches, with TensorFlow alone."""
    served = tf.saved_model.load(arguments.export)
    auc = tf.keras.metrics.AUC()
    for inputs, clicks in dataset(arguments, validation=True):
        auc.update_state(clicks, served.serve(inputs))
    return float(auc.result())


def main() -> None:
    arguments = parse_arguments()
    strategy = tfdist_ext.HybridParallelStrategy()
    tf.keras.utils.set_random_seed(arguments.seed)
    with strategy.scope():
        model = build_model(arguments)
    meter = Meter(strategy)
    callbacks = [meter]
    if arguments.backup_dir:
        backup = tf.keras.callbacks.BackupAndRestore(arguments.backup_dir)
        callbacks.append(backup)
    validation = dataset(arguments, validation=True)
    history = model.fit(
        dataset(arguments, validation=False),
        validation_data=validation,
        epochs=arguments.epochs,
        callbacks=callbacks,
        shuffle=False,
        verbose=1 if strategy.rank == 0 else 0,
    ).history
    if arguments.export:
        dtype = arguments.table_dtype
        tfdist_ext.export(model, arguments.export, dtype)
    if strategy.rank == 0:
        stock = stock_traffic(model, strategy.world_size, arguments)
        scores = {name: values[-1] for name, values in history.items()}
        if arguments.export:
            scores[f"served_auc ({dtype})"] = served_auc(arguments)
        print(table(meter, stock, scores))
        plot(arguments.report, history, meter, stock)
        print(f"plot: {arguments.report}")


if __name__ == "__main__":
    main()
