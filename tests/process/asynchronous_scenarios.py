# SPDX-License-Identifier: Apache-2.0
"""What models become where each rank steps alone: SSP and BAP."""

import gc
import time
import warnings
import weakref

import numpy as np
import tensorflow as tf
from consistency_scenarios import SAMPLES
from consistency_scenarios import arrays
from consistency_scenarios import batches
from consistency_scenarios import make_model
from consistency_scenarios import normal
from consistency_scenarios import state
from consistency_scenarios import variables_of

import tfdist_ext
from tfdist_ext.callbacks import EmbeddingMonitor
from tfdist_ext.callbacks import NanGuard
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import Timeline
from tfdist_ext.comm.requests import Requests
from tfdist_ext.layers import FullSparse
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")


class Slow(keras.callbacks.Callback):
    """Sleeps after each batch, on one rank."""

    def __init__(self, sleeps, seconds=0.05):
        super().__init__()
        self.seconds = seconds if sleeps else 0.0

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


def once(strategy, sharding):
    """A placement whose rows are looked up once per batch."""
    ranks = range(strategy.num_replicas_in_sync)
    parts = {f"{sharding}_parts": len(ranks), "ranks": tuple(ranks)}
    return TablePlacement(deduplicate=True, **parts)


def linear_model(strategy):
    """Its loss is linear in all weights: no gradient depends on weights."""
    with strategy.scope():
        ids = keras.Input([3], dtype="int64")
        x = keras.Input([2])
        sparse = FullSparse(
            2,
            40,
            use_bias=False,
            kernel_initializer=normal(1),
            name="sparse",
            sharding=once(strategy, "row"),
        )
        rows = keras.layers.Flatten()(sparse(ids))
        total = keras.layers.Dense(
            1, kernel_initializer="ones", trainable=False, name="total"
        )(rows)
        dense = keras.layers.Dense(1, kernel_initializer=normal(2), name="own")
        model = keras.Model([ids, x], keras.layers.Add()([total, dense(x)]))
        model.compile(tfdist_ext.optimizers.SGD(0.01), "mae")
    return model


def linear(strategy, folder, in_loop, slow):
    """Weights after steps whose updates may come in any order."""
    model = linear_model(strategy)
    ids, _ = arrays(46)
    x = np.random.default_rng(1).normal(size=(46, 2)).astype(np.float32)
    targets = np.full([46, 1], -1e4, np.float32)  # below all outputs
    data = tf.data.Dataset.from_tensor_slices(((ids, x), targets)).batch(6)
    if in_loop:
        loop_over(strategy, model, data)
    else:
        sleeps = Slow(slow and strategy.rank == 0)
        model.fit(data, epochs=3, verbose=0, callbacks=[sleeps])
    table = strategy.gather_table(model.get_layer("sparse"))
    own = [np.array(weight) for weight in model.get_layer("own").weights]
    updates = int(np.array(model.optimizer.iterations))
    return {"table": table, "kernel": own[0], "bias": own[1], "n": updates}


def loop_over(strategy, model, data):
    """Trains in a loop whose losses are divided by a constant."""

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.abs(model(x) - y)) / 6
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(lambda batch: strategy.run(step, (batch,)))
    for _ in range(3):
        for batch in strategy.experimental_distribute_dataset(data):
            run(batch)
        strategy.synchronize()


def bytes_of_gradients(strategy):
    """Bytes that this rank has sent so far for gradients of rows."""
    labels = strategy.statistics()["labels"]
    return sum(
        each[1] for name, each in labels.items() if name.endswith("/gradients")
    )


def seen(strategy, folder, sharding):
    """How many updates a row has had that a rank sees in its steps."""
    world = strategy.world_size
    # So wide that gradients are most of the bytes.
    start, every, dim = 128.0, 2.0, 256
    with strategy.scope():
        ids = keras.Input([1], dtype="int64")
        table = tfdist_ext.layers.Embedding(
            8,
            dim,
            embeddings_initializer=keras.initializers.Constant(start / dim),
            sharding=once(strategy, sharding),
        )
        rows = keras.layers.Flatten()(table(ids))
        total = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", trainable=False
        )(rows)
        model = keras.Model(ids, total)
        model.compile(tfdist_ext.optimizers.SGD(every / dim), "mae")
    batch = np.full([12, 1], 5), np.zeros([12, 1])
    # The last rank begins later, so its gradients wait at other times.
    ids = np.where(np.arange(12)[:, np.newaxis] < 12 - 12 // world, 5, 6)
    losses, found = [], []
    copies = strategy.collectives.row_copies
    before = bytes_of_gradients(strategy)
    for _ in range(17):  # Then gradients of two steps wait.
        time.sleep(0.01 * strategy.rank)
        this = batch if losses else (ids, batch[1])
        losses.append(float(model.train_on_batch(*this)))
        found.append(0 if copies is None else copies.counts().numpy()[1])
    sent = bytes_of_gradients(strategy) - before
    strategy.synchronize()
    (row,) = strategy.gather_table(table)[5:6]
    return {
        "bytes of gradients": sent,
        "updates": [(start - loss) / every for loss in losses],
        "updates after the round": (start - float(row.sum())) / every,
        "hits": np.diff(found),
    }


class Bias(keras.layers.Layer):
    """Adds a trained number."""

    def build(self, shape):
        self.bias = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return x + self.bias


def row_model(strategy, start, dim):
    """A model whose output is the sum of a row; all have the same names."""
    with strategy.scope():
        ids = keras.Input([1], dtype="int64")
        table = tfdist_ext.layers.Embedding(
            8,
            dim,
            embeddings_initializer=keras.initializers.Constant(start / dim),
            sharding="row",
            name="table",
        )
        rows = keras.layers.Flatten()(table(ids))
        total = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones", trainable=False
        )(rows)
        model = keras.Model(ids, Bias(name="bias")(total))
        model.compile(tfdist_ext.optimizers.SGD(0.5), "mae")
    return model


def two_models(strategy, folder, dims):
    """Each is trained by its own owners, and can be deleted."""
    models = [
        row_model(strategy, start, dim)
        for start, dim in zip((10.0, 20.0), dims, strict=True)
    ]
    batch = np.arange(8)[:, np.newaxis] % 4, np.zeros([8, 1])
    for _ in range(6):
        for model in models:
            model.train_on_batch(*batch)
    strategy.synchronize()
    for model, start, dim in zip(models, (10.0, 20.0), dims, strict=True):
        rows = strategy.gather_table(model.get_layer("table"))
        # Each of the six updates is of a quarter of the samples. In the first
        # one, other ranks may count by an earlier batch.
        expected = np.full([4, dim], start / dim - 6 * 0.5 / 4)
        np.testing.assert_allclose(rows[:4], expected, atol=0.1)
        np.testing.assert_allclose(rows[4:], start / dim)
        bias = np.array(model.get_layer("bias").bias)
        np.testing.assert_allclose(bias, -6 * 0.5, atol=0.4)
    owners = strategy.collectives.requests.owners
    tables = [each.get_layer("table") for each in models]
    deleted = [weakref.ref(each) for each in (*models, *tables)]
    deleted += [weakref.ref(each.optimizer) for each in models]
    before = len(owners)
    del models, model, tables
    keras.backend.clear_session()
    gc.collect()
    assert [each() for each in deleted] == [None] * len(deleted)
    assert len(owners) <= before - 2, dict(owners)


def trained(strategy, folder, optimizer, of_keras, options):
    """Trains and checks that all ranks have the same model afterwards."""
    model = make_model(strategy, optimizer, of_keras, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*shuffle=True.*")
        # Of Keras 3 and repeated rows.
        warnings.filterwarnings("ignore", message="Optimizer .* gets one row")
        history = model.fit(
            batches(4),
            epochs=6,
            verbose=0,
            validation_data=batches(8, seed=1),
            callbacks=[Slow(strategy.rank == 0, 0.01)],
        ).history
    assert history["loss"][-1] < history["loss"][0], history
    assert int(np.array(model.optimizer.iterations)) == 6 * -(-SAMPLES // 4)
    replicas_are_equal(strategy, model)
    staleness = strategy.statistics()["staleness"]
    assert sum(staleness.values()) >= 6 * 11 * strategy.world_size
    return state(strategy, model)


def replicas_are_equal(strategy, model):
    for each in (*model.weights, *variables_of(model.optimizer)):
        native = each.value if KERAS_3 else each
        per_rank = tf.VariableSynchronization.ON_READ
        if hasattr(native, "values") and native.synchronization != per_rank:
            mine = tf.reshape(native.values[0], [1, -1])
            everyone = strategy.gather(mine, axis=0).numpy()
            assert (everyone == everyone[0]).all(), each.name


def ahead(strategy, folder, bound):
    """The steps that rank 1 is ahead of a rank that always sleeps."""
    model = make_model(strategy, "SGD")
    model.fit(batches(4, 8), verbose=0)
    requests = strategy.collectives.requests
    started = requests.clock()
    clocks = []

    class Note(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            clocks.append((time.time(), requests.clock() - started))

    model.fit(
        batches(4, 80),
        verbose=0,
        callbacks=[Note(), Slow(strategy.rank == 0, 0.1)],
    )
    times = np.array([found for found, _ in clocks])
    everyone = strategy.gather(times[np.newaxis], axis=0).numpy()
    # The steps that rank 0 has completed when rank 1 has completed its own.
    of_slow = np.searchsorted(everyone[0], everyone[1])
    lead = int((np.arange(1, len(times) + 1) - of_slow).max())
    # Rank 0 completes a step a little before its callback is called.
    if bound is None:
        assert lead > 8, lead
    else:
        assert 2 <= lead <= bound + 2, lead


REFUSED = {
    "loss": "'.*' \\(all_gather\\) of all ranks",
    "clipnorm": "SGD with clipnorm=1.0",
    "eager": "run_eagerly=True",
    "row_clip": "has a `row_clip`",
    "int8": "wire_dtype='int8'",
    "changed gradients": "was changed before the optimizer",
    "gradient_dtype": "gradient_dtype='bfloat16'",
}


def refused(strategy, folder, what):
    """Models that need all ranks in one step."""
    import re

    def fit():
        options = {}
        if what == "eager":
            options["run_eagerly"] = True
        if what == "gradient_dtype":
            tfdist_ext.HybridParallelStrategy(
                gradient_dtype="bfloat16",
                consistency=tfdist_ext.consistency.BAP(),
            )
        model = make_model(strategy, "SGD", **options)
        with strategy.scope():
            if what == "loss":
                model.compile("sgd", lambda y, p: tf.reduce_max(y - p))
            if what == "clipnorm":
                model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
            if what == "row_clip":
                clip = tfdist_ext.optimizers.CowClip()
                optimizer = tfdist_ext.optimizers.Adam(0.1, row_clip=clip)
                model.compile(optimizer, "mse")
            if what == "int8":
                model = one_table(wire_dtype="int8")
            if what == "changed gradients":
                model = one_table(kind=Scaling)
        model.fit(batches(4), verbose=0)

    try:
        fit()
    except (ValueError, tf.errors.OpError) as error:
        assert re.search(REFUSED[what], str(error)), error
    else:
        raise AssertionError("it was not refused")


class Scaling(keras.Model):
    """Doubles its gradients."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, self(x))
        variables = self.trainable_variables
        gradients = [
            tf.IndexedSlices(2 * g.values, g.indices, g.dense_shape)
            if isinstance(g, tf.IndexedSlices)
            else 2 * g
            for g in tape.gradient(loss, variables)
        ]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def one_table(kind=keras.Model, **options):
    ids = keras.Input([3], dtype="int64")
    rows = FullSparse(4, 40, sharding="row", **options)(ids)
    model = kind(ids, keras.layers.Dense(1)(rows))
    model.compile("sgd", "mse")
    return model


def a_rank_fails(strategy, folder):
    """An error on one rank ends `fit` on all, and they train on."""
    model = make_model(strategy, "Adagrad")

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 4 and strategy.rank == 1:
                raise RuntimeError("no disk")

    start = time.monotonic()
    try:
        model.fit(batches(4), verbose=0, callbacks=[Fail()])
    except (RuntimeError, tf.errors.AbortedError) as error:
        assert "no disk" in str(error), error
    else:
        raise AssertionError("it was not told")
    assert time.monotonic() - start < 30
    model.fit(batches(4), verbose=0)
    replicas_are_equal(strategy, model)


def a_bad_id(strategy, folder):
    """An id out of range fails the step on all ranks, by name."""
    model = make_model(strategy, "Adagrad")
    ids, labels = arrays(8)
    ids[6, 0] = 12345
    try:
        model.fit(ids, labels, batch_size=8, verbose=0)
    except (tf.errors.OpError, RuntimeError) as error:
        assert "12345" in str(error) or "fit failed" in str(error), error
    else:
        raise AssertionError("it was not told")
    model.fit(batches(4), verbose=0)


def saved(strategy, folder):
    """What is written between steps is the state of one point in time."""
    model = make_model(strategy, "Adam")
    ids, labels = arrays()
    for first in range(0, 24, 8):
        part = slice(first, first + 8)
        model.train_on_batch(ids[part], labels[part])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(folder / "checkpoint"))
    written = state(strategy, model)
    replicas_are_equal(strategy, model)
    model.train_on_batch(ids[24:32], labels[24:32])
    checkpoint.read(path).expect_partial()
    for name, value in state(strategy, model).items():
        np.testing.assert_array_equal(value, written[name], err_msg=name)
    assert int(np.array(model.optimizer.iterations)) == 3


def resumed(strategy, folder):
    """A run that fails between two saves makes all its steps later."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 6 and strategy.rank == 1:
                raise RuntimeError("stop here")

    def fit(*callbacks):
        model = make_model(strategy, "Adagrad")
        data = batches(4)
        callbacks = [Resume(folder / "saved", every=4), *callbacks]
        model.fit(data, epochs=2, verbose=0, callbacks=callbacks)
        return model

    try:
        fit(Fail())
    except (RuntimeError, tf.errors.AbortedError) as error:
        assert "stop here" in str(error), error
    else:
        raise AssertionError("it did not fail")
    model = fit()
    assert int(np.array(model.optimizer.iterations)) == 2 * 11
    replicas_are_equal(strategy, model)


def watched(strategy, folder):
    """Callbacks that look at all ranks work, and see what is served."""
    model = make_model(strategy, "Adagrad")
    trace = folder / "trace.json"
    monitor = EmbeddingMonitor(every=4)
    timeline = Timeline(str(trace), steps=(2, 6))
    model.fit(batches(4), epochs=2, verbose=0, callbacks=[monitor, timeline])
    found = monitor.reports[22]
    assert found["sparse/max_norm"] > 0 and found["sparse/touched"] > 0, found
    assert "sparse/gradient_norm" not in found
    if strategy.rank == 0:
        text = trace.read_text()
        assert "own, sparse/rows" in text, text[:500]
        assert "consistency/dense" in text, text[:500]


def guarded(strategy, folder):
    """Batches that are not finite are left out, also on one rank only."""
    ids, labels = arrays(32)
    labels[9] = np.nan
    model = make_model(strategy, "SGD")
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard = NanGuard(rollback=False, factor=1.0, directory=None)
        model.fit(data, verbose=0, callbacks=[guard])
    for name, value in state(strategy, model).items():
        assert np.isfinite(value).all(), name


def averaged(strategy, folder):
    """Moving averages differ until the ranks synchronize."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([3]),
                keras.layers.BatchNormalization(momentum=0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
    model.fit(x, x[:, :1], batch_size=6, verbose=0)
    moving = np.array(model.layers[0].moving_mean)
    assert np.abs(moving).max() > 0.01
    replicas_are_equal(strategy, model)


def scaled(strategy, folder):
    """Updates count less, the older the values are that they are of."""
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input([1]),
                keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                ),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5), "mae")
    # The gradient of a sample is -1, whatever the kernel is.
    x, y = np.ones([64, 1], np.float32), np.full([64, 1], 1e4, np.float32)
    slow = Slow(strategy.rank == 0, 0.02)
    model.fit(x, y, 4, 3, 0, callbacks=[slow])
    if strategy.rank == 0:  # It owns the kernel, and makes all updates.
        counts = strategy.statistics()["staleness"]
        assert sum(counts.values()) == 3 * 16 * strategy.world_size, counts
        assert max(counts) > 1, counts
        scales = [n / max(steps, 1) for steps, n in counts.items()]
        expected = 0.5 / strategy.world_size * sum(scales)
        found = float(np.array(model.weights[0]).item())
        assert abs(found - expected) < 1e-3, (found, expected, counts)


class _Recorder:
    """Records what handlers are given, in the order in which they run."""

    def __init__(self):
        self.calls = []

    def recording(self, handler):
        number = tf.TensorSpec([], tf.int64)
        function = tf.function(handler, autograph=False).get_concrete_function(
            number, tf.TensorSpec([None], tf.uint8), number
        )

        def record(*arguments):
            self.calls.append((function, arguments))

        def handle(*arguments):
            recorded = tf.numpy_function(record, arguments, [])
            with tf.control_dependencies([recorded]):
                return function(*arguments)

        return handle


def serial(strategy, folder, optimizer):
    """Concurrent updates give what the same updates give one by one."""
    recorder = _Recorder()
    serve = Requests.serve
    Requests.serve = lambda self, place, handler: serve(
        self, place, recorder.recording(handler)
    )
    try:
        model = make_model(strategy, optimizer, jit_compile=False)
        model.train_on_batch(*arrays(8))
        strategy.synchronize()
        variables = list(own_variables(model))
        before = [each.read_value().numpy() for each in variables]
        first = {
            each.name: value
            for each, value in zip(variables, before, strict=True)
        }
        recorder.calls.clear()
        model.fit(batches(2, 88), epochs=3, verbose=0)
        calls = list(recorder.calls)
    finally:
        Requests.serve = serve
    tables = [
        each for each in variables if each.shape.rank and len(each.shape) == 2
    ]
    after = {each.name: each.read_value().numpy() for each in tables}
    for each, value in zip(variables, before, strict=True):
        each.assign(value)
    updates = 0
    for function, arguments in calls:
        function(*map(tf.constant, arguments))
        updates += 1
    assert updates > 100
    shards = [each for each in tables if is_shard(model, each)]
    assert shards
    for each in shards:
        np.testing.assert_array_equal(
            each.read_value().numpy(), after[each.name], err_msg=each.name
        )
    assert any((after[each.name] != first[each.name]).any() for each in shards)
    strategy.reduce("SUM", tf.constant(1.0), axis=None)


def own_variables(model):
    """Variables of TensorFlow with the values of this rank."""
    for each in (*model.weights, *variables_of(model.optimizer)):
        native = each.value if KERAS_3 else each
        yield native.values[0] if hasattr(native, "values") else native


def is_shard(model, variable):
    return variable.shape[0] != variable.shape[1] and any(
        variable.shape == getattr(layer, "kernel", None).shape
        for layer in [model.get_layer("sparse")]
    )
