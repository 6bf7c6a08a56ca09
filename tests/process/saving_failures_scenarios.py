# SPDX-License-Identifier: Apache-2.0
"""One rank cannot write or read."""

import pathlib
import time

import numpy as np
import tensorflow as tf
from checkpoint_scenarios import pieces
from saving_models import Model
from saving_models import filled
from saving_models import state
from saving_models import unlike

from tfdist_ext.keras_internals import value_of


def _fails_everywhere(strategy, call, *texts):
    """All ranks raise at once, the others with the text of the one."""
    begun = time.monotonic()
    try:
        call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("did not fail")
    assert time.monotonic() - begun < 20, message
    for text in texts:
        assert text in message, (text, message)
    strategy.collectives.barrier("still connected")


def write_fails(strategy, folder):
    """A part that one rank cannot write; the last checkpoint stays."""
    model = filled(strategy, Model.of(strategy))
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = str(folder / "path")
    saver.write(path)
    expected = state(strategy, model)
    filled(strategy, model, seed=1)
    shard = model.sparse.kernel
    shard = value_of(shard)
    serialize = shard._serialize_to_tensors

    def disk_full():
        raise OSError("no space left on the disk")

    if strategy.rank == 1:
        shard._serialize_to_tensors = disk_full
    _fails_everywhere(strategy, lambda: saver.write(path), "no space left")
    shard._serialize_to_tensors = serialize
    # Writes of files that TensorFlow itself cannot make.
    write = tf.raw_ops.SaveV2
    if strategy.rank == 1:
        tf.raw_ops.SaveV2 = lambda prefix, **kwargs: write(
            prefix=f"{__file__}/{prefix}", **kwargs
        )
    _fails_everywhere(strategy, lambda: saver.write(path), "saving_failures")
    tf.raw_ops.SaveV2 = write
    # Merging, which rank 0 does alone.
    merge = tf.raw_ops.MergeV2Checkpoints
    tf.raw_ops.MergeV2Checkpoints = lambda **_: disk_full()
    _fails_everywhere(strategy, lambda: saver.write(path), "no space left")
    tf.raw_ops.MergeV2Checkpoints = merge
    # A folder that is a file, on all ranks.
    below = str(pathlib.Path(__file__) / "path")
    _fails_everywhere(strategy, lambda: saver.write(below), "saving_failures")
    files = sorted(p.name for p in folder.iterdir())
    assert files == [
        "path.data-00000-of-00002",
        "path.data-00001-of-00002",
        "path.index",
    ], files
    saver.read(path).assert_consumed()
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, expected[name], name)
    saver.write(path)
    ids = tf.zeros([4, 4], tf.int64)
    model.fit(tf.data.Dataset.from_tensors((ids, ids[:, :1])), verbose=0)


def _two_checkpoints(strategy, place):
    """A model, its saver, two paths, the first one's state, and that of now."""
    model = filled(strategy, Model.of(strategy))
    saver = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    old, new = str(place / "old"), str(place / "new")
    saver.write(old)
    expected = state(strategy, model)
    filled(strategy, model, seed=1)
    saver.write(new)
    unlike(strategy, model, expected)
    return model, saver, old, new, expected, state(strategy, model)


def read_fails(strategy, folder):
    """`try: restore(new) except: restore(old)` works at every rank."""
    model, saver, old, new, expected, before = _two_checkpoints(
        strategy, folder
    )
    if strategy.rank == 0:
        data = folder / "new.data-00001-of-00002"
        content = bytearray(data.read_bytes())
        content[3] ^= 1
        data.write_bytes(content)
    strategy.collectives.barrier("damaged")
    _fails_everywhere(strategy, lambda: saver.restore(new), "Checksum")
    # The path of rank 0 counts.
    missing = f"{new}-missing" if strategy.rank == 0 else new
    _fails_everywhere(strategy, lambda: saver.read(missing), "new-missing")
    # Another shape on one rank only.
    local = [np.zeros(1 + strategy.rank), np.zeros(1)]
    with strategy.scope():
        step = tf.Variable(0.0)
    written = tf.train.Checkpoint(step=step, own=tf.Variable(local[1]))
    written.write(str(folder / "own"))
    wrong = tf.train.Checkpoint(step=step, own=tf.Variable(local[0]))
    step.assign(1.0)
    _fails_everywhere(
        strategy, lambda: wrong.read(str(folder / "own")), "shape"
    )
    assert step.numpy() == 1.0
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, before[name], name)
    saver.restore(old).assert_nontrivial_match()
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, expected[name], name)


def damaged_pieces(strategy, folder):
    """A damaged piece is found late, by name; a short file at once."""
    with pieces(64):
        model, saver, old, new, expected, before = _two_checkpoints(
            strategy, folder
        )
        # The first files are those of rank 0's pieces.
        (data,) = folder.glob("new.data-00001-of-*")
        content = data.read_bytes()
        strategy.collectives.barrier("read")
        if strategy.rank == 1:
            data.write_bytes(content[:-1])
        strategy.collectives.barrier("short")
        _fails_everywhere(strategy, lambda: saver.restore(new), "the index")
        for name, value in state(strategy, model).items():
            np.testing.assert_array_equal(value, before[name], name)
        if strategy.rank == 1:
            data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        strategy.collectives.barrier("damaged")
        texts = ("partly restored", "Checksum", "another checkpoint")
        _fails_everywhere(strategy, lambda: saver.restore(new), *texts)
        saver.restore(old).assert_nontrivial_match()
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, expected[name], name)
