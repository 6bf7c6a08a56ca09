# SPDX-License-Identifier: Apache-2.0
"""An index of one process, against those of stock; its SavedModel."""

import json
import sys

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.layers import Embedding
from tfdist_ext.layers import ShardedTopK

keras = tf.keras
RNG = np.random.default_rng(3)
ROWS = RNG.normal(size=[50, 6]).astype(np.float32)
QUERIES = tf.constant(RNG.normal(size=[4, 3, 6]).astype(np.float32))


def test_finds_what_keras_rs_finds():
    keras_rs = pytest.importorskip("keras_rs")  # needs Python 3.11
    ids = np.arange(50, dtype=np.int32) * 3
    ours = ShardedTopK(ROWS, ids, k=7)
    theirs = keras_rs.layers.BruteForceRetrieval(ROWS, ids, k=7)
    for found, expected in zip(ours(QUERIES), theirs(QUERIES), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    ours.update_candidates(ROWS[::-1].copy(), ids)
    theirs.update_candidates(ROWS[::-1].copy(), ids)
    np.testing.assert_array_equal(ours(QUERIES)[1], theirs(QUERIES)[1])


def test_half_precision_is_scored_in_single():
    scores, _ = ShardedTopK(ROWS, k=3)(tf.cast(QUERIES, tf.bfloat16))
    assert scores.dtype == tf.float32


def test_is_a_layer_of_a_functional_model_and_its_config():
    inputs = keras.Input([], dtype="int64")
    table = Embedding(50, 6)
    index = ShardedTopK(table, k=4, return_scores=False, query_model=None)
    model = keras.Model(inputs, index(table(inputs)))
    assert model.output.shape == (None, 4)
    found = model.predict(np.arange(50), verbose=0)
    assert found.dtype == np.int64
    again = ShardedTopK.from_config(index.get_config())
    assert (again.k, again.return_scores) == (4, False)


def test_a_config_has_the_query_model():
    query = keras.Sequential([keras.Input([5]), keras.layers.Dense(6)])
    index = ShardedTopK(ROWS, k=4, query_model=query)
    again = ShardedTopK.from_config(json.loads(json.dumps(index.get_config())))
    assert again.query_model.output_shape == (None, 6)
    assert again.query_model.layers[-1].units == 6


def finding(index):
    signature = [tf.TensorSpec([None, 6])]
    return tf.function(lambda queries: index(queries), signature)


def test_is_a_saved_model_in_one_process(tmp_path):
    table = Embedding(50, 6)
    users = keras.Sequential([keras.layers.Dense(6)])
    titles = np.array([f"title {i}" for i in range(50)])
    table(tf.constant([1]))
    for index in (ShardedTopK(table, titles), ShardedTopK(ROWS, titles)):
        index.query_model = users
        module = tf.Module()
        module.index = index
        module.find = finding(index)
        expected = module.find(QUERIES[0])
        tf.saved_model.save(module, str(tmp_path / index.name))
        loaded = tf.saved_model.load(str(tmp_path / index.name))
        for found, value in zip(loaded.find(QUERIES[0]), expected, strict=True):
            np.testing.assert_array_equal(found, value)


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss", reason="needs pip install faiss-cpu")


def test_an_exact_faiss_index_finds_what_the_layer_finds(faiss, tmp_path):
    ids = 7 * np.arange(50)[::-1] + 3
    index = ShardedTopK(ROWS, ids, k=5)
    path = tmp_path / "index.faiss"
    facts = index.export_faiss(path, "Flat", queries=QUERIES[0], k=4)
    assert facts["recall"] == 1.0
    assert facts["bytes"] == path.stat().st_size
    assert (facts["candidates"], facts["dim"]) == (50, 6)
    assert (facts["queries"], facts["k"]) == (3, 4)
    stored = json.loads((tmp_path / "index.faiss.json").read_text())
    assert stored == {**facts, "identifiers": None}
    scores, found = faiss.read_index(str(path)).search(QUERIES[0].numpy(), 5)
    expected = index(QUERIES[0])
    np.testing.assert_array_equal(found, expected[1])
    np.testing.assert_allclose(scores, expected[0], rtol=1e-5)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "index.faiss",
        "index.faiss.json",
    ]


def test_the_recall_of_an_approximate_index_is_measured(faiss, tmp_path):
    rows = RNG.normal(size=[3000, 16]).astype(np.float32)
    index = ShardedTopK(rows, k=10)
    rough = index.export_faiss(tmp_path / "a", "IVF64,Flat")
    assert 0 < rough["recall"] < 0.9
    assert rough["queries"] == 1000
    queries = rows[::3][: rough["queries"]]
    found = faiss.read_index(str(tmp_path / "a")).search(queries, 10)[1]
    exact = np.argsort(-(queries @ rows.T), axis=1)[:, :10]
    same = [len(set(a) & set(b)) for a, b in zip(found, exact, strict=True)]
    assert rough["recall"] == pytest.approx(np.mean(same) / 10, abs=1e-3)
    graph = index.export_faiss(tmp_path / "b")
    assert graph["factory"] == "HNSW32"
    assert graph["recall"] > rough["recall"]


def test_strings_are_found_by_position(faiss, tmp_path):
    names = [f"fil\u00e9 {i}" for i in range(50)]
    index = ShardedTopK(ROWS, tf.constant(names), k=3)
    index.export_faiss(tmp_path / "a", "Flat")
    stored = json.loads((tmp_path / "a.json").read_text())["identifiers"]
    found = faiss.read_index(str(tmp_path / "a")).search(ROWS[:2], 3)[1]
    expected = index(ROWS[:2])[1].numpy()
    assert [[stored[i] for i in each] for each in found] == [
        [name.decode() for name in each] for each in expected
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factory": "Flatt"}, ValueError, "factory='Flatt'.*parse"),
        ({"factory": "IVF999,Flat"}, ValueError, "50 candidates.*IVF999"),
        ({"queries": ROWS[:, :2]}, ValueError, r"\[q, 6\].*\(50, 2\)"),
        ({"k": 0}, ValueError, "k=0"),
        ({"path": "no folder/a"}, OSError, "no folder/a"),
    ],
)
def test_what_faiss_cannot_do_is_refused(
    faiss, tmp_path, monkeypatch, arguments, error, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        ShardedTopK(ROWS, k=3).export_faiss(**{"path": "a", **arguments})
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match="pip install faiss-cpu"):
        ShardedTopK(ROWS, k=3).export_faiss(tmp_path / "a")
