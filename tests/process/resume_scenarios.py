# SPDX-License-Identifier: Apache-2.0
"""Runs that are ended in many ways, and go on where they were."""

import contextlib
import itertools
import logging
import os
import signal
import time
import warnings

import numpy as np
import tensorflow as tf
from fit_models import BATCH
from fit_models import ROWS
from fit_models import make_model
from fit_models import same_on_all_ranks
from fit_models import weights

from tests.recording import Recorder
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import resume
from tfdist_ext.saving import checkpoint_files

keras = tf.keras
EPOCHS, STEPS = 4, 6
# Others are for the ranks themselves.
SIGNALS = (signal.SIGTERM,)


@contextlib.contextmanager
def beating_in_every_step():
    before, resume.HEARTBEAT_SECONDS = resume.HEARTBEAT_SECONDS, 0
    try:
        yield
    finally:
        resume.HEARTBEAT_SECONDS = before


def run(strategy, directory, *callbacks, epochs=EPOCHS, every=2):
    """Trains a model as a program does that is started again."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    rng = np.random.default_rng(0)
    samples = BATCH * STEPS
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = (rng.random([samples, 1]) < 0.4).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    data = data.shuffle(samples).batch(BATCH)  # anew in every epoch
    model = make_model(strategy, [keras.metrics.MeanSquaredError])
    if directory is not None:
        saved = Resume(directory, every=every, signals=SIGNALS)
        callbacks = [saved, *callbacks]
    with beating_in_every_step():
        history = model.fit(
            data, epochs=epochs, verbose=0, callbacks=list(callbacks)
        )
    return model, history.history


class At(keras.callbacks.Callback):
    """Does something once a batch has been trained, on one rank."""

    def __init__(self, strategy, rank, epoch, action):
        super().__init__()
        self.mine = strategy.rank == rank % strategy.world_size
        self.epoch, self.action = epoch, action

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.mine and self.now >= self.epoch and batch == 3:
            self.action()


class Fails(keras.callbacks.Callback):
    """Fails on one rank, once some checkpoints of later steps are there."""

    def __init__(self, strategy, directory, after):
        super().__init__()
        self.mine = strategy.rank == 0
        self.directory, self.after = directory, after

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)  # for the threads that write
        found = checkpoint_files.found_in(self.directory)
        if self.mine and sum(each.step > self.after for each in found) > 1:
            raise RuntimeError("stop here")


def notice():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)  # until the thread that counts signals has seen it


@contextlib.contextmanager
def full_disk(strategy):
    """The first file that the last rank writes fails."""
    last = strategy.world_size - 1
    write, left = tf.raw_ops.SaveV2, [last] if strategy.rank == last else []

    def fail_once(**kwargs):
        if left:
            left.clear()
            raise OSError("No space left on device")
        return write(**kwargs)

    tf.raw_ops.SaveV2 = fail_once
    try:
        yield f"rank {last}: OSError: No space left"
    finally:
        tf.raw_ops.SaveV2 = write


@contextlib.contextmanager
def logged():
    records, log = [], logging.getLogger("tfdist_ext")
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    try:
        yield records
    finally:
        log.removeHandler(handler)


def goes_on(strategy, folder):
    """By a notice, a failure and over a torn file to the same numbers."""
    directory, last = str(folder / "run"), strategy.world_size - 1
    straight, history = run(strategy, None)
    # The last rank's disk is full, then it is told to end.
    with full_disk(strategy) as why, logged() as records:
        try:
            run(strategy, directory, At(strategy, last, 1, notice))
            raise AssertionError("did not end")
        except SystemExit as end:
            assert end.code == 143
    told = [why in each.getMessage() for each in records]
    assert any(told) == (strategy.rank == 0), records
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    first = checkpoint_files.found_in(directory)[0].step
    assert STEPS < first < 2 * STEPS, first  # before the step after batch 3
    # Rank 0 fails, and the last checkpoint is damaged.
    try:
        run(strategy, directory, Fails(strategy, directory, first))
        raise AssertionError("did not fail")
    except (RuntimeError, tf.errors.AbortedError) as error:
        assert "stop here" in str(error), error
    barrier(strategy)
    newest, before, *_ = (
        each.step for each in checkpoint_files.found_in(directory)
    )
    assert newest > before > first
    barrier(strategy)
    if strategy.rank == 0:
        tear(checkpoint_files.Checkpoint(newest).path(directory))
    barrier(strategy)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter("always")
        model, rest = run(strategy, directory)
    assert any(f"ckpt-{newest}' cannot be read" in str(e.message) for e in w)
    check_same(strategy, model, straight)
    # What was logged is of whole epochs, in Keras 3 of that one too.
    begun = before % STEPS != 0 and not hasattr(keras, "ops")
    for name, values in rest.items():
        known = history[name][-len(values) :]
        assert values[begun:] == known[begun:], (name, rest, history)
    # Once more: nothing is left to do.
    model, rest = run(strategy, directory)
    assert not rest, rest
    check_same(strategy, model, straight)
    assert len(checkpoint_files.found_in(directory)) == 3
    last_step = checkpoint_files.Checkpoint(EPOCHS * STEPS).path(directory)
    assert tf.train.latest_checkpoint(directory) == last_step
    assert not list((folder / "run").glob("*_ranks"))


def tear(path):
    """Changes a byte in the middle of the last data file."""
    *_, data = sorted(tf.io.gfile.glob(f"{path}.data-*"))
    with open(data, "r+b") as file:
        file.seek(os.path.getsize(data) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def barrier(strategy):
    if strategy.collectives is not None:
        strategy.collectives.barrier("scenario")


def check_same(strategy, model, straight):
    """Bit by bit, tables and slots too."""
    pairs = zip(
        weights(strategy, model) + slots(strategy, model),
        weights(strategy, straight) + slots(strategy, straight),
        strict=True,
    )
    for found, expected in pairs:
        np.testing.assert_array_equal(found, expected)


def slots(strategy, model):
    return [strategy.gather_table(v) for v in model.optimizer.variables]


def begin(strategy, folder):
    """Trains whole, then the half of it, which `end` ends elsewhere."""
    straight, _ = run(strategy, None)
    directory = str(folder / "run")
    with contextlib.suppress(SystemExit):
        run(strategy, directory, At(strategy, 0, 2, notice), every="epoch")
    last, *_ = checkpoint_files.found_in(directory)
    assert 2 * STEPS < last.step < 3 * STEPS
    return weights(strategy, straight)


def end(strategy, folder, expected):
    """Ends what `begin` has begun at another number of ranks."""
    model, history = run(strategy, str(folder / "run"), every="epoch")
    assert len(history["loss"]) == EPOCHS - 2
    for found, value in zip(weights(strategy, model), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-4, atol=1e-5)
        assert same_on_all_ranks(strategy, found)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def trained_samples(strategy, folder, *callbacks):
    """Trains with batches of 3 samples per rank; what this rank was given."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    seen = []
    values = np.arange(60, dtype=np.float32)[:, None]
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([1]), Recorder(seen), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((values, 0 * values))
    data = data.shuffle(60).batch(3 * strategy.world_size)
    saved = Resume(folder / "run", every=100, signals=SIGNALS)
    with beating_in_every_step(), contextlib.suppress(SystemExit):
        model.fit(data, epochs=2, verbose=0, callbacks=[saved, *callbacks])
    return seen


def begin_with_batches_by_rank(strategy, folder):
    return trained_samples(strategy, folder, At(strategy, 0, 1, notice))


def end_with_batches_by_rank(strategy, folder, begun):
    """No sample of the second epoch is trained twice, or left out."""
    seen = trained_samples(strategy, folder)
    told = strategy.gather(tf.constant(flat(seen), tf.int64), 0).numpy()
    before = [flat(each) for each in begun]
    first = flat(each[: 60 // len(begun)] for each in before)
    assert sorted(first) == list(range(60)), first
    rest = flat(each[60 // len(begun) :] for each in before)
    assert len(rest) == 4 * 3 * len(begun), rest
    assert sorted([*rest, *told]) == list(range(60)), (rest, told)
