# SPDX-License-Identifier: Apache-2.0
"""Tables that are moved when a model comes to `fit`, and those that stay.

Every scenario compares what the ranks train with what this process trains by
itself, without a strategy.
"""

import numpy as np
import placing_models as models
import tensorflow as tf

import tfdist_ext
from tfdist_ext import marks
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.keras_versions import KERAS_3
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
BATCH_OF_ARRAY = 8


def places(model):
    """Where the tables are."""
    return [
        feature.spec
        for layer in models.sparse_layers(model)
        if layer.built
        for _, feature in layer.lookups()
    ]


def check_parts(model):
    """Variables have the shapes, and the marks, of where they are."""
    for layer in models.sparse_layers(model):
        variables = layer.table_variables()
        for _, feature in layer.lookups():
            variable = variables[feature.table]
            native = value_of(variable)
            assert marks.shard_spec(variable) == feature.spec
            assert tuple(variable.shape) == feature.spec.local_shape
            assert native.numpy().shape == feature.spec.local_shape


def check_planned(strategy, model, samples=models.BATCH):
    """All tables are in one plan, for the batch, and lie where it says."""
    layers = models.sparse_layers(model)
    plan = layers[0].plan
    assert all(layer.plan is plan for layer in layers)
    setting = plan.problem.setting
    assert setting.batch_size == -(-samples // strategy.world_size)
    assert setting.batch_known and "assumed" not in plan.summary()
    placed = sorted(str(p.ranks) for p in plan.placements.values())
    assert placed == sorted(str(spec.ranks) for spec in places(model))
    return plan


def compare(strategy, make, before_fit=lambda model: None):
    """Trains on the ranks and in this process alike; the ranks' model."""
    alone = models.compiled(make)
    with strategy.scope():
        model = models.compiled(make)
    for each in (alone, model):
        if each.built and models.sparse_layers(each)[0].built:
            before_fit(each)
    expected = models.fit(alone)
    before = places(model)
    losses = models.fit(model)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
    pairs = zip(
        models.weights(strategy, model),
        models.weights(None, alone),
        strict=True,
    )
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    check_parts(model)
    return model, before


def _new_values(model):
    """What a user sets before training: whole tables."""
    rng = np.random.default_rng(5)
    for layer in models.sparse_layers(model):
        for _, feature in layer.lookups():
            shape = feature.spec.rows, feature.spec.dim
            values = rng.normal(size=shape).astype(np.float32)
            layer.table_variables()[feature.table].assign(values)


def functional(strategy, folder):
    model, before = compare(strategy, models.functional, _new_values)
    assert places(model) != before, before
    check_planned(strategy, model)


def sequential(strategy, folder):
    model, _ = compare(strategy, models.sequential)
    check_planned(strategy, model)


def subclassed(strategy, folder):
    model, _ = compare(strategy, models.Subclassed)
    check_planned(strategy, model)


def nested(strategy, folder):
    model, _ = compare(strategy, models.Nested)
    assert len(models.sparse_layers(model)) == 6
    check_planned(strategy, model)


def shared(strategy, folder):
    model, _ = compare(strategy, models.Shared, _new_values)
    plan = check_planned(strategy, model)
    assert model.shared.plan is plan


def embeddings(strategy, folder):
    """Two layers name their tables alike."""
    model, before = compare(
        strategy, lambda: models.functional(models.embedding), _new_values
    )
    assert places(model) != before, before
    plan = check_planned(strategy, model)
    assert "words" in plan.placements and "table" not in plan.placements


def own_optimizers(strategy, folder):
    compare(
        strategy,
        lambda: models.functional(models.embedding, optimizer="adagrad"),
    )


def as_good_as_shared(strategy, folder):
    """Layers by themselves get what a plan for all of them at once gives."""
    with strategy.scope():
        model = models.compiled(models.functional)
        shared = models.compiled(models.Shared)
    models.fit(model)
    models.fit(shared)
    sent = [
        check_planned(strategy, each).bytes_per_step for each in (model, shared)
    ]
    assert sent[0] <= 1.05 * sent[1], sent


def saved_models(strategy, folder):
    """A model of Keras 3 that is loaded is placed, unless it has slots."""
    path = f"{folder}/model.keras"
    alone = models.compiled(models.functional)
    with strategy.scope():
        model = models.compiled(models.functional)
    for each in (alone, model):
        _new_values(each)
    model.save(path)
    load = keras.models.load_model
    with strategy.scope():
        resumed = load(path)
        loaded = models.compiled(lambda: load(path, compile=False))
    before, expected = places(loaded), models.fit(alone)
    for each in (resumed, loaded):
        np.testing.assert_allclose(models.fit(each), expected, rtol=2e-5)
    assert places(loaded) != before == places(resumed)


def weights(strategy, folder):
    """Files of tables that have been moved fit those that have not."""
    with strategy.scope():
        model, *others = (models.compiled(models.functional) for _ in range(3))
    before = places(model)
    _new_values(model)
    models.fit(model)
    path = f"{folder}/moved.weights.h5" if KERAS_3 else f"{folder}/moved"
    model.save_weights(path)
    others[0].load_weights(path)
    path = tf.train.Checkpoint(model=model).save(f"{folder}/checkpoint")
    tf.train.Checkpoint(model=others[1]).restore(path)
    expected = models.weights(strategy, model)[:6]
    for other in others:
        assert places(other) == before
        for _ in range(2):
            found = models.weights(strategy, other)[:6]
            for pair in zip(found, expected, strict=True):
                np.testing.assert_array_equal(*pair)
            other.evaluate(models.dataset(), verbose=0)  # moves them
        assert places(other) == places(model)


def fixed(strategy, folder):
    """Tables stay that a graph or a slot relies on; results are right."""
    with strategy.scope():
        model = models.compiled(models.functional)
        other = models.compiled(models.functional)
    inputs = next(iter(models.dataset()))[0]
    call = tf.function(lambda values: model(values))
    outputs = call(inputs)
    other.optimizer.build(other.trainable_variables)
    for each in (model, other):
        before = places(each)
        models.fit(each)
        assert places(each) == before
    assert not np.allclose(outputs, call(inputs))
    np.testing.assert_allclose(call(inputs), model(inputs), rtol=1e-5)


def given(strategy, folder):
    """Tables that the user has placed stay; others know of them."""
    ranks = strategy.world_size
    with strategy.scope():
        last = models.full_sparse(
            "users", sharding=TablePlacement.table_wise(ranks - 1)
        )
        rest = [models.full_sparse(name) for name in models.NAMES[1:]]
        model = models.compiled(
            lambda: keras.Sequential(
                [models.Towers([last, *rest]), models.head()]
            )
        )
    models.fit(model)
    assert last.spec.ranks == (ranks - 1,)
    check_planned(strategy, model)
    kept = {"users": last.plan.placement_of("users")}
    assert kept["users"] == TablePlacement.table_wise(ranks - 1)


def evaluated_first(strategy, folder):
    """Any loop of Keras finds the places, for its batch; once."""
    with strategy.scope():
        model = models.compiled(models.functional)
    before = places(model)
    inputs = {
        name: np.zeros([64, models.HOTNESS], np.int64) for name in models.NAMES
    }
    found = model.predict(inputs, batch_size=48, verbose=0)
    after = places(model)
    assert after != before
    check_planned(strategy, model, 48)
    models.fit(model)
    assert places(model) == after
    assert len(found) == 64


def custom_loop(strategy, folder):
    """Without a loop of Keras's nothing is moved."""
    with strategy.scope():
        model = models.compiled(models.functional)
    before = places(model)
    optimizer = model.optimizer

    @tf.function
    def step(inputs, labels):
        def replica(inputs, labels):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(inputs) - labels) ** 2)
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        strategy.run(replica, args=(inputs, labels))

    with strategy.scope():
        optimizer.build(model.trainable_variables)
    for batch in strategy.experimental_distribute_dataset(
        models.dataset(models.BATCH)
    ):
        step(*batch)
    models.fit(model)
    assert places(model) == before
    plan = models.sparse_layers(model)[0].plan
    assert not plan.problem.setting.batch_known
    assert "before the batch was known" in plan.explain("users")


def batches_that_are_known(strategy, folder):
    """Of datasets of every make, of arrays; None of a generator."""
    ranks = strategy.world_size
    inputs, labels = next(iter(models.dataset()))
    inputs = {name: value.numpy() for name, value in inputs.items()}
    labels = labels.numpy()
    whole = models.dataset(2 * models.BATCH)
    dataset_of = strategy.distribute_datasets_from_function

    def batches():
        yield inputs, labels

    cases = {
        "dataset": ({"x": whole}, models.BATCH),
        "distributed": (
            {"x": strategy.experimental_distribute_dataset(whole)},
            models.BATCH,
        ),
        "own": ({"x": dataset_of(lambda _: whole)}, models.BATCH * ranks),
        "arrays": ({"x": inputs, "y": labels, "batch_size": 40}, 40),
        "default": ({"x": inputs, "y": labels}, 32),
        "generator": ({"x": batches()}, None),
    }
    for name, (arguments, samples) in cases.items():
        with strategy.scope():
            model = models.compiled(models.functional)
        model.fit(**arguments, verbose=0)
        setting = models.sparse_layers(model)[0].plan.problem.setting
        assert setting.batch_known == (samples is not None), name
        if samples is not None:
            assert setting.batch_size == -(-samples // ranks), name


def wire_dtypes(strategy, folder):
    """Layers plan with the bytes of their own numbers."""
    with strategy.scope():
        model = models.compiled(
            lambda: models.functional(wire_dtype="bfloat16")
        )
        shared = models.SharedExchange(
            [models.full_sparse("users", wire_dtype="float16")]
        )
        shared.build([(None, models.HOTNESS)])
    (layer, *_) = models.sparse_layers(model)
    assert layer.plan.problem.setting.wire_bytes == 2
    assert shared.plan.problem.setting.wire_bytes == 2
    assert not shared.plan.problem.setting.batch_known
    models.fit(model)
    assert check_planned(strategy, model).problem.setting.wire_bytes == 2


class OnDisk:
    """An array of which a program reads what it needs, as h5py's."""

    def __init__(self, values):
        self.values = values
        self.shape, self.dtype = values.shape, values.dtype
        self.most = 0

    def __len__(self):
        return len(self.values)

    def __getitem__(self, rows):
        found = self.values[rows]
        if found.ndim < 2:  # one by one: by whoever makes an array of it
            raise AssertionError("read whole")
        self.most = max(self.most, len(found))
        return found


def arrays_on_disk(strategy, folder):
    """Shapes are known without reading all that is there."""
    ids = OnDisk(np.arange(40 * BATCH_OF_ARRAY).reshape(-1, 4) % 30)
    with strategy.scope():
        model = keras.Sequential(
            [tfdist_ext.layers.FullSparse(4, 30), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    labels = np.zeros([len(ids), 1], np.float32)
    model.fit(ids, labels, batch_size=BATCH_OF_ARRAY, shuffle=False, verbose=0)
    assert model.layers[0].plan.problem.setting.batch_known
    assert ids.most == BATCH_OF_ARRAY, ids.most


def measured(strategy, folder):
    """All ranks measure the same, and plans are made for it if asked."""
    assert strategy.collectives.machine is None  # not asked for
    machine = tfdist_ext.measure_machine(strategy)
    values = [*machine.speeds().values(), machine.cores]
    assert min(values) > 0, machine
    everyone = strategy.gather(tf.constant([values], tf.float64), axis=0)
    assert (everyone.numpy() == everyone.numpy()[0]).all()


def measured_at_start(strategy, folder):
    """Takes a strategy that has been asked to measure."""
    machine = strategy.collectives.machine
    with strategy.scope():
        model = models.compiled(models.functional)
    models.fit(model)
    setting = check_planned(strategy, model).problem.setting
    speeds = setting.link_bytes_per_second, setting.read_bytes_per_second
    assert speeds == tuple(machine.speeds().values())
