# SPDX-License-Identifier: Apache-2.0
"""Models that are served and follow the training, at any number of ranks."""

import contextlib

import numpy as np
import serving_models
import tensorflow as tf
from files_models import refused

import tfdist_ext
from tfdist_ext.layers import FullSparse

keras = tf.keras


def deltas(strategy, folder):
    """A model that is served follows the training, by what has changed."""
    _check_deltas(strategy, folder, "float32")


def deltas_of_int8(strategy, folder):
    """The same with scales."""
    _check_deltas(strategy, folder, "int8")


def deltas_of_keys(strategy, folder):
    """Keys come and go in a model that is served, as they do in training."""
    with strategy.scope():
        model = serving_models.Growing(serving_models.short_lived())
        model.compile(tfdist_ext.optimizers.Adagrad(0.5), "mse")
    ids = _learn(model, range(9))
    saver = tf.train.Checkpoint(model=model)
    saver.write(str(folder / "checkpoint"))
    tfdist_ext.export(model, folder / "served", inputs=ids, deltas=True)
    before = _keys_of(model)
    _learn(model, range(5, 14))
    with _one_rank_fails_to_place(strategy), refused(Exception, "disk is full"):
        tfdist_ext.export_delta(model, folder / "lost")
    expected, texts = [], []
    for number, train in enumerate(
        (
            lambda: _learn(model, range(12, 20)),
            lambda: saver.read(str(folder / "checkpoint")),
            lambda: None,
        ),
        1,
    ):
        train()
        path = folder / f"delta{number}"
        assert tfdist_ext.export_delta(model, path) == number
        if number < 3:  # in the last nothing has changed
            tfdist_ext.export(model, folder / f"is{number}", inputs=ids)
        expected.append(_keys_of(model))
        texts.append(_texts_of(model))
    assert not before["oldest"] <= expected[0]["oldest"]
    assert expected[1] == before
    if strategy.rank > 0:
        return
    served = tf.saved_model.load(str(folder / "served"))
    every = np.arange(30).reshape(10, 3)
    for number in (1, 2, 3):
        told = tfdist_ext.apply_delta(served, folder / f"delta{number}")
        assert (told["rows"] > 0) == (number < 3), told
        if number < 3:
            fresh = tf.saved_model.load(str(folder / f"is{number}"))
        np.testing.assert_array_equal(served.serve(every), fresh.serve(every))
        for mine, its in zip(served.keys, fresh.keys, strict=True):
            assert _pairs_of(mine) == _pairs_of(its)
        for model_texts in (served.texts, fresh.texts):
            found = model_texts["rarest"].numpy()
            assert found.tolist() == texts[number - 1]


def _learn(model, ids):
    """Three steps on ids, the first ones most often."""
    ids = np.array([*ids, *list(ids)[:3]] * 3)
    ids = ids[: len(ids) // 3 * 3].reshape(-1, 3)
    data = tf.data.Dataset.from_tensor_slices((ids, np.ones([len(ids), 1])))
    model.fit(data.batch(-(-len(ids) // 3)), verbose=0)
    return ids


def _keys_of(model):
    return {
        name: set(map(str, found["keys"].tolist()))
        for name, found in model.embedding.get_vocabularies().items()
    }


def _texts_of(model):
    """By row of a table, b"" where no key is."""
    found = model.embedding.get_vocabularies()["rarest"]
    rows = dict(zip(found["rows"].tolist(), found["texts"], strict=True))
    assert min(map(int, rows.values())) >= 0 and len(rows) > 5
    return [rows.get(row, b"") for row in range(13)]


def _pairs_of(keys):
    """What a hash table of a loaded model has."""
    found = tf.raw_ops.LookupTableExportV2(
        table_handle=keys.table.resource_handle,
        Tkeys=tf.int64,
        Tvalues=tf.int64,
    )
    whole = np.column_stack([found.keys.numpy(), found.values.numpy()])
    # A place where no key is, or is no more, has a second word below zero.
    return sorted(each for each in whole.tolist() if each[1] >= 0)


def _check_deltas(strategy, folder, dtype):
    model = _three_tables(strategy)
    with refused(ValueError, "deltas=True"):
        tfdist_ext.export_delta(model, folder / "too early")
    tfdist_ext.export(model, folder / "plain", dtype)
    tfdist_ext.export(model, folder / "served", dtype, deltas=True)
    touched = 0
    for number in (1, 2):
        ids = _train(model, seed=number)
        path = folder / f"delta{number}"
        assert tfdist_ext.export_delta(model, path) == number
        touched = len(np.unique(ids))
    with _one_rank_fails_to_place(strategy), refused(Exception, "disk is full"):
        tfdist_ext.export_delta(model, folder / "lost")
    tfdist_ext.export(model, folder / "expected", dtype)
    if strategy.rank > 0:
        return
    plain, served, expected = (
        tf.saved_model.load(str(folder / name))
        for name in ("plain", "served", "expected")
    )
    with refused(ValueError, "was exported without deltas"):
        tfdist_ext.apply_delta(plain, folder / "delta1")
    # By the model itself, and by this package.
    served.apply_delta(str(folder / "delta1"))
    before = served.serve(ids).numpy()
    _refuse_bad_deltas(served, folder)
    np.testing.assert_array_equal(served.serve(ids), before)
    told = tfdist_ext.apply_delta(served, folder / "delta2")
    # The second table has a row for every two ids, the third one five.
    assert told["number"] == 2
    assert touched < told["rows"] <= 2 * touched + 5
    assert not np.array_equal(served.serve(ids), before)
    np.testing.assert_array_equal(served.serve(ids), expected.serve(ids))
    for name, table in expected.tables.items():
        for part in ("values", "scales")[: 1 + (dtype == "int8")]:
            np.testing.assert_array_equal(
                getattr(served.tables[name], part), getattr(table, part)
            )


def _three_tables(strategy):
    """A model with tables in rows, in columns and on every rank."""

    def sparse(name, rows, sharding):
        return FullSparse(
            4,
            rows,
            kernel_initializer=serving_models.normal(5),
            sharding=sharding,
            name=name,
        )

    with strategy.scope():
        ids = keras.Input([3], dtype="int64", name="ids")
        found = [
            sparse("rows", 400, "row")(ids),
            sparse("columns", 400, "column")(ids),
            sparse("copied", 5, "replicated")(
                keras.layers.Lambda(lambda value: value % 5)(ids)
            ),
        ]
        joined = keras.layers.Concatenate()(found)
        model = keras.Model(ids, keras.layers.Dense(1)(joined))
        model.compile(tfdist_ext.optimizers.Adagrad(0.5), "mse")
    _train(model, seed=0)
    return model


def _train(model, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 400, [16, 3])
    labels = rng.random([16, 1]).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(16)
    model.fit(data, verbose=0)
    return ids


def _refuse_bad_deltas(served, folder):
    """Nothing of a delta is applied that is not right as a whole."""
    good = (folder / "delta2").read_bytes()
    middle = len(good) // 2
    flipped = good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :]
    header = 12 + int.from_bytes(good[:8], "little") + 4
    for text, content in (
        ("orrupted", flipped),
        ("truncated", good[:middle]),
        ("Records are missing", good[:header]),
        ("empty", b""),
        ("applied in order", (folder / "delta1").read_bytes()),
    ):
        (folder / "bad").write_bytes(content)
        with refused(Exception, text):
            tfdist_ext.apply_delta(served, folder / "bad")
    with refused(tf.errors.NotFoundError, "none"):
        tfdist_ext.apply_delta(served, folder / "none")


@contextlib.contextmanager
def _one_rank_fails_to_place(strategy):
    """Rank 0 cannot write the file."""
    write = tf.io.TFRecordWriter

    def fail(path):
        raise OSError("disk is full")

    if strategy.rank == 0:
        tf.io.TFRecordWriter = fail
    try:
        yield
    finally:
        tf.io.TFRecordWriter = write
