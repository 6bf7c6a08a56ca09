# SPDX-License-Identifier: Apache-2.0
"""Positions of streams in one process: files, generators, refusals."""

import itertools
import json
import time

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.recording import Recorder
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import resume
from tfdist_ext.data import PositionedDataset
from tfdist_ext.saving import checkpoint_files

keras = tf.keras


@pytest.fixture(scope="module")
def strategy():
    return tfdist_ext.HybridParallelStrategy()


def write_lines(path, ids, end="\n"):
    with path.open("a") as file:
        file.write("".join(f"{each}\n" for each in ids)[: -1 or None] + end)


def read(dataset):
    """The records of each batch, as numbers."""
    return [batch.numpy().astype(int).tolist() for batch in dataset]


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def follow(strategy, dataset, most=None):
    """The same, read as by a step; the position moves."""
    distributed = strategy.experimental_distribute_dataset(dataset)
    return read(itertools.islice(iter(distributed), most))


def write_records(path, ids):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for each in ids:
            writer.write(str(each).encode())


def test_files_are_read_in_order_and_again_where_they_grow(strategy, tmp_path):
    write_lines(tmp_path / "b.csv", range(10, 15))
    write_lines(tmp_path / "a.csv", range(5))
    (tmp_path / ".hidden.csv").write_text("99\n")
    stream = PositionedDataset.from_files(tmp_path)
    data = stream.batches(4)
    whole = [[0, 1, 2, 3], [4, 10, 11, 12], [13, 14]]
    assert read(data) == whole
    assert stream.get_state()["offsets"] == {}  # the program's own iterator
    assert follow(strategy, data) == whole
    assert follow(strategy, data) == []
    assert read(PositionedDataset.from_files(tmp_path).batches(4)) == whole
    # Later, an iterator of the program is not taken for one of a step.
    write_lines(tmp_path / "b.csv", [15])
    assert read(data) == [[15]]
    assert follow(strategy, data) == [[15]]
    # A record without its end is none. A file may sort before the others.
    write_lines(tmp_path / "a.csv", [5, 6], end="")
    write_lines(tmp_path / "A.csv", [20])
    assert follow(strategy, data) == [[20, 5]]
    with (tmp_path / "a.csv").open("a") as file:
        file.write("7\n")
    assert follow(strategy, data) == [[67]]


def test_the_position_is_what_was_trained_not_what_was_read(strategy, tmp_path):
    write_records(tmp_path / "0.tfrecord", range(100))
    stream = PositionedDataset.from_files(tmp_path)
    data = stream.batches(3).prefetch(5)
    assert follow(strategy, data, 2) == [[0, 1, 2], [3, 4, 5]]
    state = json.loads(json.dumps(stream.get_state()))
    later = PositionedDataset.from_files(tmp_path)
    later.set_state(state)
    assert read(later.batches(50))[0][0] == 6
    # The same stream goes on there, too.
    assert follow(strategy, data, 1) == [[6, 7, 8]]


def test_a_checkpoint_of_tensorflow_has_the_position(strategy, tmp_path):
    write_records(tmp_path / "0.tfrecord", range(9))
    pattern = tmp_path / "*.tfrecord"
    stream = PositionedDataset.from_files(pattern)
    follow(strategy, stream.batches(2), 2)
    path = tf.train.Checkpoint(stream=stream).write(str(tmp_path / "saved"))
    follow(strategy, stream.batches(2))
    tf.train.Checkpoint(stream=stream).read(path)
    assert follow(strategy, stream.batches(9)) == [[4, 5, 6, 7, 8]]


def test_two_iterators_of_one_stream_are_refused(strategy, tmp_path):
    write_records(tmp_path / "0.tfrecord", range(9))
    stream = PositionedDataset.from_files(tmp_path)
    data = strategy.experimental_distribute_dataset(stream.batches(2))
    first, second = iter(data), iter(data)
    assert next(first).numpy().tolist() == [b"0", b"1"]
    assert next(second).numpy().tolist() == [b"2", b"3"]
    with pytest.raises(tf.errors.OpError, match="read one iterator at a time"):
        next(first)
    assert next(second).numpy().tolist() == [b"4", b"5"]


def test_parallel_maps_keep_the_position(strategy, tmp_path):
    write_records(tmp_path / "0.tfrecord", range(50))
    stream = PositionedDataset.from_files(tmp_path)
    data = stream.batches(3).map(tf.identity, tf.data.AUTOTUNE).prefetch(9)
    first = follow(strategy, data, 7)
    assert flat(first) == list(range(21))
    assert flat(follow(strategy, data)) == list(range(21, 50))


def test_a_small_batch_comes_when_it_lingers(strategy, tmp_path):
    write_lines(tmp_path / "a.csv", range(3))
    stream = PositionedDataset.from_files(tmp_path)
    data = stream.batches(100, wait=60.0, linger=0.1)
    assert follow(strategy, data, 1) == [[0, 1, 2]]
    # An iterator that waits can be left at once.
    iterator = iter(strategy.experimental_distribute_dataset(data.prefetch(9)))
    write_lines(tmp_path / "a.csv", [3])
    next(iterator)
    del iterator


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.shuffle(9), "ShuffleDataset"),
        (lambda d: d.repeat(), "RepeatDataset"),
        (lambda d: d.filter(lambda x: True), "FilterDataset"),
        (lambda d: d.unbatch().batch(2), "BatchDataset"),
        (lambda d: tf.data.Dataset.zip((d, d)), "ZipDataset"),
        (
            lambda d: d.map(tf.identity, 2, deterministic=False),
            "map with deterministic=False",
        ),
    ],
)
def test_what_loses_the_records_is_refused(strategy, tmp_path, change, named):
    write_records(tmp_path / "0.tfrecord", range(9))
    data = change(PositionedDataset.from_files(tmp_path).batches(2))
    with pytest.raises(ValueError, match=f"has a {named}, after which"):
        strategy.experimental_distribute_dataset(data)


def test_wrong_arguments_are_named(tmp_path):
    make = PositionedDataset.from_files
    with pytest.raises(ValueError, match=r"format of the files .* is unknown"):
        make(tmp_path)
    with pytest.raises(ValueError, match="file_format='avro'"):
        make(tmp_path, file_format="avro")
    with pytest.raises(ValueError, match="mounted file system"):
        make("gs://bucket/*.csv")
    stream = make(tmp_path, file_format="csv")
    with pytest.raises(ValueError, match="batch_size=None"):
        stream.batches()
    with pytest.raises(ValueError, match=r"wait=-1"):
        stream.batches(2, wait=-1)
    with pytest.raises(ValueError, match="stream of kafka, and this stream"):
        stream.set_state({"kind": "kafka"})
    with pytest.raises(ValueError, match="list without __next__, get_state"):
        PositionedDataset.from_generator([])


def test_files_that_shrink_or_are_damaged_are_errors(strategy, tmp_path):
    path = tmp_path / "a.csv"
    write_lines(path, range(5))
    stream = PositionedDataset.from_files(tmp_path)
    follow(strategy, stream.batches(5))
    path.write_text("1\n")
    with pytest.raises(tf.errors.OpError, match="cut or replaced"):
        follow(strategy, stream.batches(5))
    path.write_text('"open\n')
    with pytest.raises(tf.errors.OpError, match="with an open quote"):
        read(PositionedDataset.from_files(path).batches(5))
    other = tmp_path / "b.tfrecord"
    write_records(other, range(5))
    data = bytearray(other.read_bytes())
    data[3] ^= 1  # of a length
    other.write_bytes(data)
    with pytest.raises(tf.errors.OpError, match="no record of TFRecord at b"):
        read(PositionedDataset.from_files(other).batches(5))
    data[3] ^= 1
    data[12] ^= 1  # of a record
    other.write_bytes(data)
    with pytest.raises(tf.errors.OpError, match="corrupted record"):
        read(PositionedDataset.from_files(other).batches(5))


def test_lines_of_csv(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"head\r\n1\r\n\r\n2\r\n")
    (tmp_path / "b.csv").write_bytes(b"head\n")
    stream = PositionedDataset.from_files(tmp_path, header=True)
    assert flat(read(stream.batches(2))) == [1, 2]


def test_parquet(strategy, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    stream = PositionedDataset.from_files(tmp_path, file_format="parquet")
    with pytest.raises(ValueError, match="no complete Parquet file"):
        stream.batches(4)
    for number in range(2):
        ids = np.arange(7) + 7 * number
        table = {
            "id": ids,
            "name": [f"n{each}" for each in ids],
            "seen": [[each] * (each % 3) for each in ids],
        }
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(arrow.table(table), path, row_group_size=3)
    (tmp_path / "2.parquet").write_bytes(path.read_bytes()[:-9])
    data = stream.batches(5)
    distributed = iter(strategy.experimental_distribute_dataset(data))
    first = [next(distributed) for _ in range(2)]
    assert first[1]["id"].numpy().tolist() == [5, 6, 7, 8, 9]
    assert first[1]["name"].numpy().tolist()[0] == b"n5"
    assert first[1]["seen"].to_list() == [[5, 5], [], [7], [8, 8], []]
    # The next one goes on there; a file is read once it is complete.
    (tmp_path / "2.parquet").write_bytes(path.read_bytes())
    rest = [b["id"].numpy().tolist() for b in data]
    assert rest == [[10, 11, 12, 13, 7], [8, 9, 10, 11, 12], [13]]


class Numbers:
    """Batches of numbers, and a state."""

    def __init__(self, end, binary=False):
        self.at, self.end, self.binary = 0, end, binary

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        x = np.full([4, 1], self.at, np.float32)
        return x, 0 * x

    def get_state(self):
        return bytes([self.at]) if self.binary else {"at": self.at}

    def set_state(self, state):
        self.at = state[0] if self.binary else state["at"]


class StopAfter(keras.callbacks.Callback):
    """Fails after a number of batches."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)  # for the threads that write
        self.batches -= 1
        if not self.batches:
            raise RuntimeError("stop here")


def fit(strategy, seen, x, *callbacks, **options):
    keras.backend.clear_session()
    with strategy.scope():
        layers = [keras.Input([1]), Recorder(seen), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse")
    model.fit(x, verbose=0, callbacks=[*callbacks], **options)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("given", ["generator", "stream"])
def test_a_generator_with_a_state_goes_on(
    strategy, tmp_path, given, binary, monkeypatch
):
    monkeypatch.setattr(resume, "HEARTBEAT_SECONDS", 0)

    def data():
        numbers = Numbers(20, binary)
        if given == "generator":
            return numbers
        return PositionedDataset.from_generator(numbers).batches().prefetch(3)

    seen = []
    steps = {"steps_per_epoch": 5, "epochs": 4}
    with pytest.raises(RuntimeError, match="stop here"):
        saved = Resume(tmp_path / "run", every=1)
        fit(strategy, seen, data(), saved, StopAfter(8), **steps)
    assert len(seen) == 8
    done = checkpoint_files.found_in(str(tmp_path / "run"))[0].step
    assert 2 < done < 8
    del seen[done:]
    fit(strategy, seen, data(), Resume(tmp_path / "run", every=1), **steps)
    assert [batch[0] for batch in seen] == list(range(1, 21))


def test_other_data_at_a_position_is_refused(strategy, tmp_path):
    fit(strategy, [], Numbers(3), Resume(tmp_path / "run"))
    arrays = tf.data.Dataset.from_tensors(next(Numbers(1)))
    with pytest.raises(ValueError, match="position in a PositionedDataset, an"):
        fit(strategy, [], arrays, Resume(tmp_path / "run"), epochs=2)
