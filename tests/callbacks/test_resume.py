# SPDX-License-Identifier: Apache-2.0
"""What `Resume` refuses, what it keeps, and how it heeds signals."""

import itertools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.recording import Recorder
from tfdist_ext.callbacks import EmbeddingMonitor
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import resume
from tfdist_ext.callbacks import resume as resume_lib
from tfdist_ext.callbacks import saved_run
from tfdist_ext.saving import checkpoint_files
from tfdist_ext.saving import checkpoint_writing

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
    assert checkpoint_files.found_in(f"{folder}/none") == []
    names = ["2", "10", "9", "3-since-2", "11-since-10", "13-since-10"]
    names += ["14-since-10", "15-since-2", "20", "21-since-20"]
    for name in names:
        for end in ("index", "data-00000-of-00001"):
            (tmp_path / f"ckpt-{name}.{end}").touch()
    for unfinished in ("16_ranks", "16-since-2_ranks"):
        (tmp_path / f"ckpt-{unfinished}").mkdir()
    (tmp_path / "ckpt-x.index").touch()
    checkpoint_files.keep_last(folder, 2, last=15)
    checkpoint_files.remove_unfinished(folder)
    found = [each.name for each in checkpoint_files.found_in(folder)]
    # Without that whose full one is gone, and without what came later.
    assert found == ["ckpt-14-since-10", "ckpt-10", "ckpt-9"]
    assert tf.train.latest_checkpoint(folder) == f"{folder}/ckpt-10"
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 2 * len(found) + 2
    assert "ckpt-x.index" in left


def test_generators_go_on():
    states = saved_run.random_states()
    drawn = np.random.random(3)
    saved_run.set_random_states(states)
    assert (np.random.random(3) == drawn).all()


PROGRAM = """
import ctypes, signal, threading, time
from tfdist_ext.callbacks.resume import PreemptionSignals

notice = PreemptionSignals()

def tell():
    while not notice.signal:
        time.sleep(0.01)
    print(notice.signal, flush=True)

with notice.recording([signal.SIGTERM]):
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
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143


SAMPLES = 48


class StopAt(keras.callbacks.Callback):
    """Sends SIGTERM after a batch of the second epoch."""

    def __init__(self, batch):
        super().__init__()
        self.batch = batch

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 1 and batch == self.batch:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # until the thread that counts signals has seen it


class Calls(keras.callbacks.Callback):
    """Notes batches with the number of steps that were trained."""

    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.steps = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.steps.append(int(self.model.optimizer.iterations))


@pytest.fixture
def beating(monkeypatch):
    """A signal is noticed before the next step."""
    monkeypatch.setattr(resume, "HEARTBEAT_SECONDS", 0)


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def shuffled(batch):
    values = np.arange(SAMPLES, dtype=np.float32)[:, None]
    data = tf.data.Dataset.from_tensor_slices((values, 0 * values))
    return data.shuffle(SAMPLES).batch(batch)


def run(strategy, folder, data, *callbacks, layers=(), epochs=3, **options):
    """Trains as a program does that is started anew; returns `Calls`."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([1]), *layers, keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse", **options)
    calls = Calls()
    saved = Resume(folder, every=100)
    if isinstance(data, int):
        data = shuffled(data)
    # In front of `Resume` too: it cannot hide a call from that one.
    model.fit(
        data, epochs=epochs, verbose=0, callbacks=[calls, saved, *callbacks]
    )
    return calls


def test_skipped_batches_call_nobody(strategy, tmp_path, beating):
    with pytest.raises(SystemExit):
        run(strategy, tmp_path, 8, StopAt(3))
    calls = run(strategy, tmp_path, 8)
    assert calls.begun == calls.ended == [4, 5, *range(6)]
    assert calls.steps == list(range(11, 19))


def test_executions_of_several_steps_go_on(strategy, tmp_path, beating):
    with pytest.raises(SystemExit):
        run(strategy, tmp_path, 8, StopAt(3), steps_per_execution=2)
    calls = run(strategy, tmp_path, 8, steps_per_execution=2)
    assert calls.begun == [4, 0, 2, 4]
    assert calls.steps == [12, 14, 16, 18]


@pytest.mark.parametrize("batch", [16, 4, 5, 9, 30])
def test_another_batch_size_repeats_and_drops_nothing(
    strategy, tmp_path, beating, batch
):
    straight, seen = [], []
    run(strategy, tmp_path / "straight", 8, layers=[Recorder(straight)])
    recorder = Recorder(seen)
    with pytest.raises(SystemExit):
        run(strategy, tmp_path, 8, StopAt(3), layers=[recorder])
    assert len(seen) == 10
    calls = run(strategy, tmp_path, batch, layers=[Recorder(seen)])
    assert flat(seen) == flat(straight)
    assert calls.begun == calls.ended
    assert calls.begun[0] == 32 // batch
    assert max(map(len, seen[10:])) == batch


def test_a_position_in_a_batch_of_own_data_is_refused(
    strategy, tmp_path, beating
):
    def own(batch):
        options = tf.data.Options()
        policy = tf.data.experimental.AutoShardPolicy.OFF
        options.experimental_distribute.auto_shard_policy = policy
        return shuffled(batch).with_options(options)

    def train(batch, *callbacks):
        keras.utils.set_random_seed(3)
        run(strategy, tmp_path, own(batch), *callbacks)

    with pytest.raises(SystemExit):
        train(8, StopAt(3))
    with pytest.raises(ValueError, match=r"4 batches with 32 .*of 8 samples"):
        train(5)
    train(16)


def test_another_batch_size_of_arrays(strategy, tmp_path, beating):
    values = np.arange(SAMPLES, dtype=np.float32)[:, None]

    def train(batch, seen, *callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input([1]), Recorder(seen), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        callbacks = [Resume(tmp_path, every=100), *callbacks]
        options = {"epochs": 2, "verbose": 0, "callbacks": callbacks}
        model.fit(values, values, batch_size=batch, **options)

    seen = []
    with pytest.raises(SystemExit):
        train(8, seen, StopAt(1))
    train(4, seen)
    assert sorted(flat(seen[6:])) == list(range(SAMPLES))


def test_an_epoch_of_given_steps_may_hold_other_samples(
    strategy, tmp_path, beating
):
    """The place is that in the data, whatever an epoch then has."""
    straight, seen = [], []
    more = {"epochs": 4}
    run(strategy, tmp_path / "straight", 8, layers=[Recorder(straight)])

    def train(batch, layer, *callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input([1]), layer, keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse")
        callbacks = [Resume(tmp_path, every=100), *callbacks]
        model.fit(
            shuffled(batch).repeat(),
            steps_per_epoch=3,
            verbose=0,
            callbacks=callbacks,
            **more,
        )

    with pytest.raises(SystemExit):
        train(8, Recorder(seen), StopAt(1))
    assert len(seen) == 5
    train(4, Recorder(seen))
    # Of the second epoch two thirds are done, then come two more of three.
    assert list(map(len, seen)) == [8] * 5 + [4] * 7
    assert len(set(flat(seen[:7]))) == SAMPLES


@pytest.mark.parametrize("every", [1, 2])
def test_a_monitor_goes_on(strategy, tmp_path, beating, every):
    def train(*callbacks):
        keras.backend.clear_session()
        keras.utils.set_random_seed(3)
        ids = np.arange(SAMPLES)[:, None]
        with strategy.scope():
            table = tfdist_ext.layers.FullSparse(4, SAMPLES)
            model = keras.Sequential(
                [keras.Input([1], dtype="int64"), table, keras.layers.Dense(1)]
            )
            model.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
        data = tf.data.Dataset.from_tensor_slices((ids, ids / SAMPLES)).batch(8)
        monitor = EmbeddingMonitor(every=every)
        callbacks = [monitor, Resume(tmp_path, every=100), *callbacks]
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return monitor

    with pytest.raises(SystemExit):
        train(StopAt(3))
    monitor = train()
    assert sorted(monitor.reports) == list(range(every, 3, every))
    assert all(
        np.isfinite([*r.values()]).all() for r in monitor.reports.values()
    )


@pytest.fixture
def full_disk(monkeypatch):
    """Every write fails, until the list is emptied."""
    full, write = [True], checkpoint_writing.Parts.write

    def fail(parts):
        if full:
            raise OSError(28, "No space left on device")
        write(parts)

    monkeypatch.setattr(checkpoint_writing.Parts, "write", fail)
    return full


def test_an_end_that_is_not_saved_is_an_error(
    strategy, tmp_path, full_disk, caplog, recwarn
):
    saved = Resume(tmp_path, every=1)
    model = make_model(strategy)
    said = "step 8 .*No space left.* no checkpoint in .*8 steps are lost"
    with pytest.raises(OSError, match=said):
        model.fit(*DATA, batch_size=1, epochs=2, verbose=0, callbacks=[saved])
    # Once, not for each of the saves, and without lines of the source.
    (record,) = [r for r in caplog.records if r.name == "tfdist_ext"]
    assert "could not be written, training goes on" in record.getMessage()
    assert not [w for w in recwarn if "written" in str(w.message)]
    # With room again the same program goes on.
    full_disk.clear()
    model.fit(*DATA, batch_size=1, epochs=2, verbose=0, callbacks=[saved])
    assert checkpoint_files.found_in(str(tmp_path))[0].step == 8


@pytest.mark.parametrize("before", [False, True])
def test_a_signal_on_a_full_disk_says_what_is_lost(
    strategy, tmp_path, beating, full_disk, capsys, before
):
    if before:
        full_disk.clear()
        run(strategy, tmp_path, 8, epochs=1)
        full_disk.append(True)
    with pytest.raises(SystemExit) as end:
        run(strategy, tmp_path, 8, StopAt(3))
    assert end.value.code == resume_lib.NOT_SAVED == 74
    told = capsys.readouterr().err
    assert "got SIGTERM; step 10 could not be saved: rank 0: OSErr" in told
    last = "4 steps are lost" if before else "no checkpoint in"
    assert last in told, told
    assert told.rstrip().endswith("ends with exit code 74")
    assert "saved '" not in told


def test_a_file_system_without_room(strategy, tmp_path):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input([2]), keras.layers.Dense(20_000)]
            )
            model.compile("sgd", "mse")
        with pytest.raises(OSError, match="could not be saved: rank 0: "):
            model.fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_all_is_on_the_disk_before_it_is_said(strategy, tmp_path, monkeypatch):
    synced, sync = set(), os.fsync

    def note(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make_model(strategy).fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    names = [path.name for path in tmp_path.iterdir()]
    files = [n for n in names if n.startswith("ckpt-1.") or n == "checkpoint"]
    assert len(files) == 3
    for name in [*files, "."]:
        assert (tmp_path / name).stat().st_ino in synced, name


@pytest.mark.parametrize("others", [True, False])
def test_an_index_that_is_gone_is_told(strategy, tmp_path, caplog, others):
    model = make_model(strategy)
    fit = {"batch_size": 1, "verbose": 0}
    for epochs in (1, 2):
        saved = Resume(tmp_path, every=100)
        model.fit(*DATA, epochs=epochs, callbacks=[saved], **fit)
    (tmp_path / "ckpt-8.index").unlink()
    if not others:
        (tmp_path / "ckpt-4.index").unlink()
        with pytest.raises(OSError, match="ckpt-8: its index file is missing"):
            model.fit(*DATA, epochs=2, callbacks=[saved], **fit)
        return
    model.fit(*DATA, epochs=2, callbacks=[saved], **fit)
    assert f"'{tmp_path}/ckpt-8' is left out: its index file is" in caplog.text


def test_a_folder_that_is_removed_is_named(strategy, tmp_path, monkeypatch):
    write = checkpoint_writing.Parts.write

    def remove(parts):
        write(parts)
        tf.io.gfile.rmtree(parts.folder)

    monkeypatch.setattr(checkpoint_writing.Parts, "write", remove)
    with pytest.raises(OSError, match="were removed while") as error:
        make_model(strategy).fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    assert "share" not in str(error.value)


HOLDER = """
import runpy, sys
lock = runpy.run_path(sys.argv[1])["FolderLock"](sys.argv[2])
print("holds", flush=True)
sys.stdin.read()
"""


def test_a_second_job_in_a_folder_is_refused(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(saved_run, "LOCK_SECONDS", 0.2)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, saved_run.__file__, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "holds\n"
        said = f"in use by process {other.pid} on host .* since 20..-"
        with pytest.raises(OSError, match=said):
            make_model(strategy).fit(
                *DATA, verbose=0, callbacks=[Resume(tmp_path)]
            )
        other.stdin.close()
        assert other.wait(10) == 0
    # One after another, also in one process.
    for epochs in (1, 2):
        make_model(strategy).fit(
            *DATA, epochs=epochs, verbose=0, callbacks=[Resume(tmp_path)]
        )


def test_a_folder_that_cannot_be_locked_is_a_warning(
    strategy, tmp_path, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(saved_run.fcntl, "lockf", refuse)
    make_model(strategy).fit(*DATA, verbose=0, callbacks=[Resume(tmp_path)])
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text


def test_the_wait_at_the_end_is_counted(strategy, tmp_path, monkeypatch):
    write = checkpoint_writing.Parts.write

    def slow(parts):
        time.sleep(0.4)
        write(parts)

    monkeypatch.setattr(checkpoint_writing.Parts, "write", slow)
    saved = Resume(tmp_path)
    make_model(strategy).fit(*DATA, verbose=0, callbacks=[saved])
    assert 0.4 <= saved.seconds < 4
