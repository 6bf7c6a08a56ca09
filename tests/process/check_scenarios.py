# SPDX-License-Identifier: Apache-2.0
"""What checks say, and that they leave nothing behind."""

import contextlib
import logging
from unittest import mock

import check_models
import numpy as np
import tensorflow as tf

from tfdist_ext.numbers import check_runs
from tfdist_ext.numbers.check_runs import CannotCheck

keras = tf.keras


@contextlib.contextmanager
def said():
    """What the package's logger says inside: levels and texts."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda r: found.append((r.levelname, r.getMessage()))
    logger = logging.getLogger("tfdist_ext")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def checking(strategy, mode, corrects=True):
    """Models inside are checked so, with or without corrections."""
    collectives = strategy.collectives
    collectives.check, collectives.corrects = mode, corrects
    collectives.drifted.clear()
    try:
        with said() as found:
            yield found
    finally:
        collectives.check, collectives.corrects = "auto", True


def fitted(strategy, folder, name, mode, corrects=True, options=None):
    """Trains a model.

    Args:
        strategy: of some ranks.
        folder: nothing is written.
        name: of the model.
        mode: of the check.
        corrects: whether steps are corrected for the ranks' parts.
        options: of `compile`, and "drop".

    Returns:
        What was said, logs, and bytes of weights and slots of this rank.
    """
    options = dict(options or {})
    dataset = check_models.data().batch(
        check_models.BATCH, drop_remainder=options.pop("drop", False)
    )
    with strategy.scope():
        model = check_models.compiled(name, **options)
    with checking(strategy, mode, corrects) as found:
        logs = model.fit(dataset, epochs=2, verbose=0).history
    keys = [
        {name: values.tolist() for name, values in table.items()}
        for layer in model.layers
        if hasattr(layer, "get_vocabularies")
        for table in layer.get_vocabularies().values()
    ]
    return found, logs, _state_of(model), keys


def _state_of(model):
    variables = model.optimizer.variables
    variables = variables() if callable(variables) else variables
    found = []
    for variable in [*model.trainable_variables, *variables]:
        native = getattr(variable, "_value", variable)
        if isinstance(native, tf.distribute.DistributedValues):
            native = native.values[0]
        value = tf.raw_ops.ReadVariableOp(
            resource=native.handle, dtype=native.dtype
        )
        found.append(value.numpy().tobytes())
    return found


def raises(strategy, folder, name):
    """Checks a wrong model with "error"; returns the message."""
    try:
        fitted(strategy, folder, name, "error", corrects=False)
    except ValueError as error:
        return str(error)
    return ""


def short_of_memory(strategy, folder, mode):
    """The last rank has little memory; returns what `fitted` does."""
    rank = strategy.collectives.group.rank
    last = rank == strategy.collectives.group.world_size - 1
    available = (lambda: 64) if last else check_runs.available_bytes
    with mock.patch.object(check_runs, "available_bytes", available):
        return fitted(strategy, folder, "Right", mode)


def cannot_compare(strategy, folder, mode):
    """A batch that cannot be gathered; returns what is said and raised."""

    def gather(batch, collectives):
        raise CannotCheck("element 0 cannot be gathered")

    error = ""
    with mock.patch.object(check_runs, "whole_batch_of", gather):
        try:
            found = fitted(strategy, folder, "Right", mode)[0]
        except ValueError as raised:
            found, error = [], str(raised)
    return found, error


def from_a_generator(strategy, folder, mode):
    """The batch that is checked is trained, and each only once."""
    calls = []

    def batches():
        for x, y in check_models.data().batch(check_models.BATCH):
            calls.append(len(y))
            yield x, y

    spec = check_models.data().batch(check_models.BATCH).element_spec
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    with strategy.scope():
        model = check_models.compiled("Right")
    with checking(strategy, mode) as found:
        model.fit(dataset, epochs=1, verbose=0)
    return found, calls, int(model.optimizer.iterations.numpy())


def in_a_loop(strategy, folder, wrong):
    """Checks a step of a loop that the program has written."""
    dataset = check_models.data().batch(check_models.BATCH)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with strategy.scope():
        model = check_models.MODELS["Table"]()
        optimizer = check_models.tfdist_ext.optimizers.Adam(0.05)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = tf.square(model(x, training=True) - y)
            loss = tf.reduce_sum(losses) / check_models.BATCH
            if wrong:
                loss = tf.reduce_mean(losses)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    with said() as found:
        report = strategy.check_step(step, batch)
    return found, report.ok, report.lines, int(optimizer.iterations.numpy())


class Spoils(keras.callbacks.Callback):
    """Changes a weight on one rank only."""

    def __init__(self, strategy, epoch):
        super().__init__()
        self.strategy, self.epoch = strategy, epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch and self.strategy.rank == 1:
            spoil(self.model)


def spoil(model):
    """Changes a weight on this rank."""
    kernel = model.last.kernel
    part = getattr(kernel, "_value", kernel).values[0]
    part.assign_add(tf.ones_like(part))


def drifts(strategy, folder, mode):
    """One rank parts from the others in the second epoch."""
    with strategy.scope():
        model = check_models.compiled("Right")
    dataset = check_models.data().batch(check_models.BATCH)
    with checking(strategy, mode) as found:
        try:
            model.fit(
                dataset, epochs=3, verbose=0, callbacks=[Spoils(strategy, 1)]
            )
        except ValueError as error:
            return found, str(error)
    return found, ""


def drifts_before_a_save(strategy, folder, how):
    """One rank parts from the others after training."""
    with strategy.scope():
        model = check_models.compiled("Right")
    dataset = check_models.data().batch(check_models.BATCH)
    model.fit(dataset, epochs=1, verbose=0)
    if strategy.rank == 1:
        spoil(model)
    with checking(strategy, "auto") as found:
        if how == "checkpoint":
            tf.train.Checkpoint(model=model).write(str(folder / "saved"))
        else:
            model.save_weights(folder / "saved.weights.h5")
    return found


def in_sparse_batches(strategy, folder):
    """Ragged, sparse and string elements are gathered as one process has them.

    Returns:
        The whole batch as lists, of every kind.
    """
    rank = strategy.rank
    texts = tf.constant([["a", "bc"], [f"rank {rank}", ""]])[: 2 - rank]
    ragged = tf.ragged.constant([[[1], [2, 3]], [[]], [[4]]][rank:], tf.int64)
    sparse = tf.sparse.from_dense([[0, rank + 1], [5, 0]])
    flags = tf.constant([True, rank == 0])
    batch = {"t": texts, "r": ragged, "s": sparse, "f": flags}
    whole = check_runs.whole_batch_of(batch, strategy.collectives)
    return (
        whole["t"].numpy().tolist(),
        whole["r"].to_list(),
        tf.sparse.to_dense(whole["s"]).numpy().tolist(),
        np.asarray(whole["f"]).tolist(),
    )
