# SPDX-License-Identifier: Apache-2.0
"""Training that watches itself, at two ranks and more."""

import time

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.callbacks import EmbeddingMonitor
from tfdist_ext.callbacks import NanGuard
from tfdist_ext.callbacks import Timeline
from tfdist_ext.launch import trace
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

keras = tf.keras
BATCH, STEPS, DIM = 8, 12, 4
ROWS = {"users": 30, "items": 20, "days": 40}


def data(poisoned=()):
    """Global batches; the last sample of some has a weight that is NaN."""
    rng = np.random.default_rng(3)
    ids = {
        name: rng.integers(0, rows, [BATCH * STEPS, 2])
        for name, rows in (*ROWS.items(), ("words", 1 << 40))
    }
    labels = rng.normal(size=[BATCH * STEPS, 1]).astype(np.float32)
    for step in poisoned:
        labels[(step + 1) * BATCH - 1] = np.nan
    return tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)


def make_model(strategy, rate=0.1, **compiled):
    ranks = strategy.world_size
    placement = tfdist_ext.TablePlacement
    placements = {
        "users": placement.row_wise(ranks),
        "items": placement.grid(ranks // 2, 2),
        "days": placement.data_parallel(),
        "words": placement.row_wise(ranks),
    }
    with strategy.scope():
        features = {}
        inputs = {}
        for name, where in placements.items():
            growing = {"vocabulary": DynamicVocabulary(50, evict="lru")}
            table = TableConfig(
                name,
                ROWS.get(name, 0),
                embedding_dim=DIM,
                initializer=keras.initializers.RandomNormal(0, 0.1, seed=2),
                placement=where,
                **({} if name in ROWS else growing),
            )
            features[name] = FeatureConfig(name, table, (None, 2), (None, DIM))
            inputs[name] = keras.Input([2], dtype="int64", name=name)
        found = DistributedEmbedding(features, name="embedding")(inputs)
        hidden = keras.layers.Concatenate()([found[name] for name in features])
        hidden = keras.layers.BatchNormalization()(hidden)
        start = keras.initializers.GlorotUniform(seed=5)
        output = keras.layers.Dense(1, name="top", kernel_initializer=start)(
            hidden
        )
        model = keras.Model(inputs, output)
        optimizer = tfdist_ext.optimizers.Adam(rate)
        model.compile(optimizer, "mse", metrics=["mae"], **compiled)
    return model


def state_of(model):
    layer = model.get_layer("embedding")
    found = {n: t.numpy() for n, t in layer.get_embedding_tables().items()}
    found["keys"] = layer.get_vocabularies()["words"]["keys"]
    for i, weight in enumerate(model.get_layer("top").weights):
        found[f"top/{i}"] = np.array(weight)
    for i, weight in enumerate(model.layers[-2].weights):
        found[f"normal/{i}"] = np.array(weight)
    return found


def assert_same(actual, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


def nan_leaves_the_state(strategy, folder):
    """One rank's NaN updates nothing on any; the batch is in a file."""
    model = make_model(strategy)
    model.fit(data().take(3), verbose=0)
    before, rest = state_of(model), data((5,)).skip(5).take(1)
    guard = NanGuard(rollback=False, directory=folder / "bad")
    model.fit(rest, verbose=0, callbacks=[guard])
    last = strategy.world_size - 1
    (message,) = guard.faults
    assert f"the loss of rank {last};" in message, message
    assert f"came from the samples of rank {last}." in message, message
    assert "rows of the gradient of table 'users' (row " in message, message
    after = state_of(model)
    # Keys are learned when they are looked up, before the loss.
    learned = ("keys", "words")
    kept = {k: v for k, v in before.items() if k not in learned}
    assert_same(after, kept)
    rate = float(np.array(model.optimizer.learning_rate))
    assert np.isclose(rate, 0.05), rate
    strategy.collectives.barrier("written")
    batch = np.load(folder / "bad" / f"batch-1-rank-{strategy.rank}.npz")
    mine = slice(
        5 * BATCH + strategy.rank * BATCH // strategy.world_size,
        5 * BATCH + (strategy.rank + 1) * BATCH // strategy.world_size,
    )
    ids, labels = data((5,)).unbatch().batch(BATCH * STEPS).get_single_element()
    np.testing.assert_array_equal(batch["batch/0/users"], ids["users"][mine])
    np.testing.assert_array_equal(batch["batch/1"], labels[mine])


def guard_rolls_back(strategy, folder):
    """Training goes on from the state of some steps before, and ends."""
    model = make_model(strategy)
    guard = NanGuard(every=2, directory=None, most=2)
    history = model.fit(data((5,)).take(8), verbose=0, callbacks=[guard])
    (message,) = guard.faults
    assert "Not finite in step 6 (epoch 0, batch 5): the loss" in message
    assert message.endswith("to step 2. Learning rate now 0.05."), message
    assert np.isfinite(history.history["loss"]).all(), history.history
    expected = make_model(strategy)
    expected.fit(data().take(2), verbose=0)
    expected.optimizer.learning_rate = 0.05
    expected.fit(data().skip(6).take(2), verbose=0)
    assert_same(state_of(model), state_of(expected))
    assert "train_step" not in vars(model)
    assert "apply" not in vars(model.optimizer)
    # What an update makes infinite is found in the rows themselves.
    before = state_of(model)
    model.optimizer.learning_rate = np.inf
    guard = NanGuard(factor=1, directory=None, most=1)
    try:
        model.fit(data(), verbose=0, callbacks=[guard])
        raise AssertionError("did not end")
    except RuntimeError as error:
        assert "1 steps that were not finite" in str(error), error
    (message,) = guard.faults
    assert " rows of table 'users' (row " in message, message
    assert_same(state_of(model), before)


def tables_are_reported(strategy, folder):
    """Figures of all ranks are those of the whole tables."""
    model = make_model(strategy)
    layer = model.get_layer("embedding")
    before = {n: t.numpy() for n, t in layer.get_embedding_tables().items()}
    monitor = EmbeddingMonitor(every=3, log_dir=folder / "logs")
    histograms = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: histograms.append(
            monitor.histogram("users", 5)
        )
    )
    history = model.fit(
        data().take(4), verbose=0, callbacks=[monitor, look]
    ).history
    after = {n: t.numpy() for n, t in layer.get_embedding_tables().items()}
    for name, table in after.items():
        norms = np.linalg.norm(table, axis=1)
        np.testing.assert_allclose(
            history[f"{name}/max_norm"], norms.max(), rtol=1e-6
        )
        untouched = (table == before[name]).all(axis=1)
        assert 0 < untouched.sum() < len(table)
        np.testing.assert_allclose(history[f"{name}/dead"], untouched.mean())
        assert history[f"{name}/touched"] < [1 - untouched.mean()]
        assert history[f"{name}/nan"] == [0.0]
    counts = layer.vocabulary_counts()["words"]
    assert history["words/fill"] == [counts["rows"] / counts["capacity"]]
    reported = monitor.reports[3]["words/admitted"] * 3
    reported += monitor.reports[4]["words/admitted"]
    assert reported == counts["admitted"]
    counted, edges = histograms[0]
    norms = np.linalg.norm(after["users"], axis=1)
    edges[-1] *= 1 + 1e-6  # norms in float64 differ a little
    np.testing.assert_array_equal(counted, np.histogram(norms, edges)[0])
    strategy.collectives.barrier("written")
    (events,) = (folder / "logs").glob("events*")
    for name, figures in monitor.reports[4].items():
        assert name.encode() in events.read_bytes(), (name, figures)
    gradients_and_nan_are_seen(strategy, model, after)


def gradients_and_nan_are_seen(strategy, model, before):
    """SGD at rate 1 moves a row by its gradient; the next one is NaN."""
    layer = model.get_layer("embedding")
    with strategy.scope():
        optimizer = tfdist_ext.optimizers.SGD(1.0)
        model.compile(optimizer, "mse")
    tables = []

    def keep(batch, logs):
        found = layer.get_embedding_tables().items()
        tables.append({name: table.numpy() for name, table in found})

    monitor = EmbeddingMonitor([*ROWS], every=1)
    keeps = keras.callbacks.LambdaCallback(on_train_batch_end=keep)
    model.fit(data((1,)).take(2), verbose=0, callbacks=[monitor, keeps])
    for name in ROWS:
        np.testing.assert_allclose(
            monitor.reports[1][f"{name}/gradient_norm"],
            np.linalg.norm(tables[0][name] - before[name]),
            rtol=1e-4,
        )
        wrong = ~np.isfinite(tables[1][name]).all(axis=1)
        assert 0 < wrong.sum() < len(wrong)
        assert np.isclose(monitor.reports[2][f"{name}/nan"], wrong.mean())
        longest = np.linalg.norm(tables[1][name][~wrong], axis=1).max()
        assert np.isclose(monitor.reports[2][f"{name}/max_norm"], longest)
    try:
        model.fit(data(), callbacks=[EmbeddingMonitor(["cats"])], verbose=0)
        raise AssertionError("was not refused")
    except ValueError as error:
        known = "['days', 'items', 'users', 'words']"
        assert f"has the tables {known}" in str(error)
    try:
        monitor.histogram("cats")
        raise AssertionError("was not refused")
    except ValueError as error:
        assert "watches the tables ['days', 'items', 'users']" in str(error)


def slow_rank_is_seen(strategy, folder):
    """The trace of all ranks says which one the others wait for."""
    model = make_model(strategy)
    path = folder / "trace.json"

    def be_slow(batch, logs):
        if strategy.rank == 1:
            time.sleep(0.2)

    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=be_slow)
    model.fit(data(), verbose=0, callbacks=[Timeline(path, (4, 8)), slow])
    strategy.collectives.barrier("written")
    events = trace.read(path)
    ranks = list(range(strategy.world_size))
    for rank in ranks:
        mine = [event for event in events if event.rank == rank]
        steps = [e.name for e in mine if e.kind == trace.STEP]
        assert steps == ["step 4", "step 5", "step 6", "step 7"]
        ids = [e for e in mine if e.name == "embedding/ids"]
        assert len(ids) == 4
        for each in ids:
            sent = each.more["sent_to"]
            assert sum(sent.values()) == each.more["bytes_sent"]
            assert set(sent) == {f"rank {r}" for r in ranks if r != rank}
        # In the first exchange of a step; others are late where the profiler
        # starts.
        waits = [e for e in mine if e.more.get("waited_us", 0.0) > 100e3]
        last = [e.more["came_last"] for e in waits]
        if rank != 1:
            assert max(last, key=last.count) == "rank 1", last
        received = [e.more["received_from"].get("rank 0") for e in ids]
        if rank == 1:
            others = [
                e.more["sent_to"]["rank 1"]
                for e in events
                if e.rank == 0 and e.name == "embedding/ids"
            ]
            assert received == others
        assert any(e.name == "Tfdist>Lookup" for e in mine)
        waited = sum(e.more.get("waited_us", 0.0) for e in mine)
        assert (waited > 4 * 100e3) == (rank != 1), (rank, waited)
    text = trace.report(events)
    assert "Bound by rank 1: the others wait" in text, text
    assert text.endswith("more time than they do in: callbacks."), text
