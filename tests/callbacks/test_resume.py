# SPDX-License-Identifier: Apache-2.0
"""What `Resume` refuses, what it keeps, and how it heeds signals."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import notice as notice_lib
from tfdist_ext.callbacks import random_states
from tfdist_ext.checkpoints import kept

keras = tf.keras
DATA = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "hour"}, "every='hour'"),
        ({"every": True}, "every=True"),
        ({"keep": 0}, "keep=0"),
        ({"keep": 1.5}, "keep=1.5"),
        ({"deltas": -1}, "deltas=-1"),
        ({"deltas": True}, "deltas=True"),
    ],
)
def test_wrong_arguments_are_named(wrong, said):
    with pytest.raises(ValueError, match=said):
        Resume("somewhere", **wrong)


@pytest.fixture(scope="module")
def strategy():
    return tfdist_ext.HybridParallelStrategy()


def make_model(strategy, built=True):
    layers = [keras.layers.Dense(1)]
    with strategy.scope():
        model = keras.Sequential([keras.Input([2])] * built + layers)
        model.compile("sgd", "mse")
    return model


def test_a_model_of_no_strategy_is_refused(strategy, tmp_path):
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="needs a model of a HybridPara"):
        model.fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])


def test_two_at_once_are_refused(strategy, tmp_path):
    callbacks = [Resume(tmp_path), Resume(tmp_path)]
    with pytest.raises(ValueError, match="takes one Resume"):
        make_model(strategy).fit(*DATA, verbose=0, callbacks=callbacks)


def test_nothing_that_can_be_read_is_an_error(strategy, tmp_path):
    """Not a run that begins anew without a word."""
    model = make_model(strategy)
    model.fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    handler = signal.getsignal(signal.SIGTERM)
    for index in tmp_path.glob("*.index"):
        index.write_bytes(index.read_bytes()[:40])
    with (
        pytest.warns(UserWarning, match="ckpt-1' cannot be read"),
        pytest.raises(OSError, match=f"None of the checkpoints in '{tmp_path}"),
    ):
        model.fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    # No trace of it is left.
    assert signal.getsignal(signal.SIGTERM) is handler
    assert model.fit(*DATA, verbose=0).history["loss"]


def test_deltas_that_save_nothing_are_told(strategy, tmp_path):
    """As of what changes as a whole in every step."""
    model = make_model(strategy)
    saved = Resume(tmp_path, every=1, deltas=2)
    with pytest.warns(UserWarning, match="bytes have changed since the last"):
        model.fit(*DATA, batch_size=1, epochs=40, verbose=0, callbacks=[saved])
    assert tf.train.latest_checkpoint(tmp_path).endswith("ckpt-160")
    # Too short a file is torn; the one before may be a delta.
    for data in tmp_path.glob("ckpt-160.data-*"):
        os.truncate(data, 10)
    with pytest.warns(UserWarning, match="ckpt-160' cannot be read"):
        model.fit(*DATA, batch_size=1, epochs=40, verbose=0, callbacks=[saved])


def test_the_last_checkpoints_are_kept(tmp_path):
    folder = str(tmp_path)
    assert kept.found_in(f"{folder}/none") == []
    names = ["2", "10", "9", "3-since-2", "11-since-10", "13-since-10"]
    names += ["14-since-10", "15-since-2", "20", "21-since-20"]
    for name in names:
        for end in ("index", "data-00000-of-00001"):
            (tmp_path / f"ckpt-{name}.{end}").touch()
    for unfinished in ("16_ranks", "16-since-2_ranks"):
        (tmp_path / f"ckpt-{unfinished}").mkdir()
    (tmp_path / "ckpt-x.index").touch()
    kept.keep(folder, 2, last=15)
    kept.remove_unfinished(folder)
    found = [each.name for each in kept.found_in(folder)]
    # Without that whose full one is gone, and without what came later.
    assert found == ["ckpt-14-since-10", "ckpt-10", "ckpt-9"]
    assert tf.train.latest_checkpoint(folder) == f"{folder}/ckpt-10"
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2 * len(found) + 2
    assert "ckpt-x.index" in left


def test_generators_go_on():
    states = random_states.get()
    drawn = np.random.random(3)
    random_states.set_(states)
    assert (np.random.random(3) == drawn).all()


PROGRAM = """
import ctypes, runpy, signal, sys, threading, time

notice = runpy.run_path(sys.argv[1])["Notice"]()

def tell():
    while not notice.signal:
        time.sleep(0.01)
    print(notice.signal, flush=True)

with notice.heeding([signal.SIGTERM]):
    threading.Thread(target=tell, daemon=True).start()
    print("waits", flush=True)
    # A lock that its own thread waits for: no signal interrupts that.
    mutex = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


def test_a_second_signal_ends_at_once():
    """Also while the main thread is in a call that does not end."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, notice_lib.__file__],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
