# SPDX-License-Identifier: Apache-2.0
"""What models become under the modes of `consistency`."""

import contextlib
import gc
import warnings

import numpy as np
import tensorflow as tf
from compression_scenarios import compressed

import tfdist_ext
from tfdist_ext.callbacks import NanGuard
from tfdist_ext.callbacks import Resume
from tfdist_ext.compression import TopK
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FullSparse

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
ROWS, SAMPLES, EPOCHS = 40, 44, 2


def arrays(samples=SAMPLES, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, ROWS, [samples, 3])
    labels = (rng.random([samples, 1]) < 0.4).astype(np.float32)
    return ids, labels


def scope(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def normal(seed):
    return keras.initializers.RandomNormal(0, 0.3, seed=seed)


def make_model(
    strategy, optimizer, of_keras=False, accumulation=None, **compile_arguments
):
    """Two tables of ours, one of Keras, and dense layers."""
    steps = {}
    if accumulation:  # An argument of Keras 3.
        steps = {"gradient_accumulation_steps": accumulation}
    with scope(strategy):
        ids = keras.Input([3], dtype="int64")
        layers = [
            FullSparse(
                4,
                ROWS,
                sharding="row",
                name="sparse",
                kernel_initializer=normal(1),
            ),
            Embedding(ROWS, 4, embeddings_initializer=normal(2), name="own"),
            keras.layers.Embedding(
                ROWS, 2, embeddings_initializer=normal(3), name="stock"
            ),
        ]
        found = [layer(ids) for layer in layers]
        pooled = [found[0], *map(keras.layers.Flatten(), found[1:])]
        hidden = keras.layers.Dense(
            5, "tanh", kernel_initializer=normal(4), name="hidden"
        )(keras.layers.Concatenate()(pooled))
        output = keras.layers.Dense(
            1, "sigmoid", kernel_initializer=normal(5), name="output"
        )(hidden)
        model = keras.Model(ids, output)
        kinds = keras.optimizers if of_keras else tfdist_ext.optimizers
        model.compile(
            getattr(kinds, optimizer)(0.1, **steps),
            "binary_crossentropy",
            **compile_arguments,
        )
    return model


def state(strategy, model):
    """Tables and dense weights."""
    tables = {}
    for name in ("sparse", "own"):
        layer = model.get_layer(name)
        if strategy is not None:
            tables[name] = strategy.gather_table(layer)
        else:
            tables[name] = np.array(whole(layer))
    for name in ("stock", "hidden", "output"):
        for i, weight in enumerate(model.get_layer(name).weights):
            tables[f"{name}/{i}"] = np.array(weight)
    return tables


def whole(layer):
    kernel = getattr(layer, "kernel", None)
    return layer.embeddings if kernel is None else kernel


def batches(size, samples=SAMPLES, seed=0):
    data = tf.data.Dataset.from_tensor_slices(arrays(samples, seed))
    return data.batch(size)


def fitted(strategy, folder, size, optimizer, of_keras, options):
    """Losses of the epochs, weights, and the number of updates."""
    model = make_model(strategy, optimizer, of_keras, **options)
    history = model.fit(batches(size), epochs=EPOCHS, verbose=0).history
    updates = int(np.array(model.optimizer.iterations))
    return {"loss": history["loss"], "updates": updates} | state(
        strategy, model
    )


def fitted_after_others(strategy, folder, size, optimizer):
    """Like `fitted`; ranks delete models at different times before.

    The models are in the middle of a round. `alive` counts those that the rank
    has not deleted yet.
    """
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            model = make_model(strategy, optimizer)
            for _ in range(2):
                model.train_on_batch(*arrays(size))
            if strategy.collectives.requests is not None:
                # Other ranks may be in the last step, and need the owners.
                strategy.synchronize()
            del model
            if strategy.rank == number % strategy.world_size:
                gc.collect()
        alive = len(strategy.extended.rounds.trained())
        found = fitted(strategy, folder, size, optimizer, False, {})
        return found | {"alive": alive}
    finally:
        gc.enable()


def looped(strategy, folder, size, optimizer, accumulation=None):
    """As `fitted`, in a loop that divides by a constant batch size."""
    model = make_model(strategy, optimizer, accumulation=accumulation)
    data = batches(size)
    if strategy is not None:
        data = strategy.experimental_distribute_dataset(data)

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.binary_crossentropy(y, model(x))
            loss = tf.reduce_sum(losses) / size
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    @tf.function
    def run(batch):
        if strategy is None:
            step(batch)
        else:
            strategy.run(step, (batch,))

    for _ in range(EPOCHS):
        for batch in data:
            run(batch)
        if strategy is not None:
            strategy.synchronize()
    updates = int(np.array(model.optimizer.iterations))
    return {"updates": updates} | state(strategy, model)


def calls_of(strategy, label):
    found = strategy.statistics()["labels"].get(label)
    return (0, 0) if found is None else (found[0], found[1])


def gradients_sent(strategy, folder, label):
    """Calls and bytes of a label in an epoch without the check."""
    model = make_model(strategy, "SGD")
    model.fit(batches(4), verbose=0)  # the check, and an end of a round
    before = calls_of(strategy, label)
    model.fit(batches(4, 48), verbose=0)
    after = calls_of(strategy, label)
    return [int(b - a) for a, b in zip(before, after, strict=True)]


def evaluated_and_saved(strategy, folder):
    """A round ends early; what is read later is what was written."""
    model = make_model(strategy, "Adam")
    ids, labels = arrays()
    model.train_on_batch(ids[:8], labels[:8])
    before = state(strategy, model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(folder / "checkpoint"))
    after = state(strategy, model)
    assert changed(before, after), "the round has not ended"
    assert int(np.array(model.optimizer.iterations)) == 1
    model.train_on_batch(ids[8:16], labels[8:16])
    checkpoint.read(path).expect_partial()
    model.evaluate(batches(8), verbose=0)  # nothing of the round is left
    equal(state(strategy, model), after)
    for how in ("evaluate", "predict_on_batch", "save"):
        model.train_on_batch(ids[8:16], labels[8:16])
        before = state(strategy, model)
        if how == "evaluate":
            model.evaluate(batches(8), verbose=0)
        elif how == "predict_on_batch":
            model.predict_on_batch(ids[:8])
        else:
            name = "m.weights.h5" if KERAS_3 else "m"
            model.save_weights(str(folder / name))
        assert changed(before, state(strategy, model)), how


def changed(before, after):
    return any(np.any(before[name] != after[name]) for name in before)


def equal(found, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def resumed(strategy, folder, optimizer, accumulation=None):
    """A run that fails within a round goes on as one that does not."""

    class Fail(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches == 9:
                raise RuntimeError("stop here")

    def fit(folder, *callbacks):
        model = make_model(strategy, optimizer, accumulation=accumulation)
        model.fit(
            batches(4),
            epochs=EPOCHS,
            verbose=0,
            callbacks=[Resume(folder, every=4), *callbacks],
        )
        return state(strategy, model)

    straight = fit(folder / "straight")
    try:
        fit(folder / "again", Fail())
        raise AssertionError("did not fail")
    except RuntimeError as error:
        assert "stop here" in str(error)
    strategy.reduce("SUM", tf.constant(1.0), axis=None)
    equal(fit(folder / "again"), straight)


def guarded(strategy, folder):
    """Batches that are not finite are no steps of a round."""
    ids, labels = arrays(32)
    wrong = np.insert(labels, 8, np.full([4, 1], np.nan), axis=0)
    more = np.insert(ids, 8, ids[:4], axis=0)

    def fit(ids, labels, *callbacks):
        model = make_model(strategy, "SGD")
        data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4)
        model.fit(data, verbose=0, callbacks=list(callbacks))
        return state(strategy, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard = NanGuard(rollback=False, factor=1.0, directory=None)
        found = fit(more, wrong, guard)
    assert len(guard.faults) == 1
    expected = fit(ids, labels)
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )


def rolled_back(strategy, folder):
    """A roll back drops the steps of the unfinished round as well."""
    ids, labels = arrays(44)
    wrong = labels.copy()
    wrong[20] = np.nan  # in step 5, of which the round has steps 3 and 4

    def fit(ids, labels, *callbacks):
        model = make_model(strategy, "SGD")
        data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(4)
        model.fit(data, verbose=0, callbacks=list(callbacks))
        return state(strategy, model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guard = NanGuard(every=4, factor=1.0, directory=None)
        found = fit(ids, wrong, guard)
    assert "Rolled back to step" in guard.faults[0]
    expected = fit(ids[24:], labels[24:])
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
        )


def exported(strategy, folder):
    """An exported model is the model after the end of its round."""
    model = make_model(strategy, "Adam")
    ids, labels = arrays()
    for first in (0, 8):
        part = slice(first, first + 8)
        model.train_on_batch(ids[part], labels[part])
    before = state(strategy, model)
    path = str(folder / "served")
    tfdist_ext.export(model, path)
    assert changed(before, state(strategy, model)), "the round has not ended"
    served = tf.saved_model.load(path).signatures["serving_default"]
    (found,) = served(tf.constant(ids)).values()
    np.testing.assert_allclose(
        found, model.predict_on_batch(ids), rtol=1e-5, atol=1e-6
    )


def fitted_compressed(strategy, folder, size):
    """As `fitted`, with a compression that leaves nothing out."""
    if strategy is None:
        return fitted(strategy, folder, size, "SGD", False, {})
    with compressed(strategy, TopK(1.0)):
        return fitted(strategy, folder, size, "SGD", False, {})


def linear(strategy, folder, size, samples, in_loop, epochs=2):
    """Weights and slots of one dense layer, trained by momentum."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=[samples, 3]).astype(np.float32)
    y = rng.normal(size=[samples, 1]).astype(np.float32)
    with scope(strategy):
        model = keras.Sequential(
            [
                keras.Input([3]),
                keras.layers.Dense(
                    1,
                    use_bias=False,
                    kernel_initializer=keras.initializers.Constant(0.5),
                ),
            ]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.5), "mse")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    if in_loop:
        loop_over(strategy, model, data, size, epochs)
    else:
        model.fit(data, epochs=epochs, verbose=0)
    found = [np.array(model.layers[-1].kernel)[:, 0]]
    slots = model.optimizer.variables
    slots = slots() if callable(slots) else slots
    found += [np.array(v)[:, 0] for v in slots if len(v.shape) == 2]
    for each in found:
        everyone = strategy.gather(tf.constant(each[np.newaxis]), axis=0)
        np.testing.assert_array_equal(
            everyone, np.array([each] * len(everyone))
        )
    return found


def loop_over(strategy, model, data, size, epochs):
    """Trains a model in a loop that divides by a constant batch size."""

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x) - y)) / size
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    run = tf.function(lambda batch: strategy.run(step, (batch,)))
    for _ in range(epochs):
        for batch in strategy.experimental_distribute_dataset(data):
            run(batch)
        strategy.synchronize()


def local_replicas(strategy, folder, held=False):
    """After `fit` all ranks have the same weights and slots; none is told."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*shuffle=True.*")
        model = make_model(strategy, "Adam")
        history = model.fit(
            batches(8), epochs=6, verbose=0, validation_data=batches(8, seed=1)
        ).history
    losses = history["loss"]
    for name in ("dense_held_back", "rows_held_back") if held else ():
        assert all(0 <= share <= 1 for share in history[name])
        assert max(history[name]) > 0
        assert 0 < strategy.statistics()[name] <= 1
    assert losses[-1] < losses[0], losses
    for each in (*model.weights, *variables_of(model.optimizer)):
        native = each.value if KERAS_3 else each
        if hasattr(native, "values") and native.dtype.is_floating:
            mine = tf.reshape(native.values[0], [1, -1])
            everyone = strategy.gather(mine, axis=0).numpy()
            assert (everyone == everyone[0]).all(), each.name


def variables_of(optimizer):
    found = optimizer.variables
    return found() if callable(found) else found
