# SPDX-License-Identifier: Apache-2.0
"""What `fit`, `evaluate` and `predict` read, on one or more ranks."""

import numpy as np
import tensorflow as tf

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
BATCHES = 6


class Trained(keras.callbacks.Callback):
    """Which batches were trained, by labels that are powers of two."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1

    def on_epoch_end(self, epoch, logs=None):
        total = round(float(logs["loss"]) * self.steps)
        self.epochs.append([i for i in range(BATCHES) if total >> i & 1])


def batches(forever=False, weights=False):
    """Batches 0 to 5, once or for ever; `x` has the same rows of 64 bytes."""
    while True:
        for i in range(BATCHES):
            x, y = np.ones([4, 16], np.float32), np.full([4, 1], 2.0**i)
            yield (x, y, None) if weights else (x, y)
        if not forever:
            return


def mean_of_labels(y_true, y_pred):
    return tf.reduce_mean(tf.cast(y_true, tf.float32) + 0 * y_pred, -1)


def make_model(strategy, built=False, **arguments):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        arguments = {"loss": mean_of_labels, **arguments}
        model.compile(keras.optimizers.SGD(0.1), **arguments)
        if built:
            model.build((None, 16))
    return model


def fit(strategy, x, model=None, **arguments):
    trained = Trained()
    model = model or make_model(strategy)
    model.fit(x, verbose=0, callbacks=[trained], **arguments)
    return trained.epochs


def generators(strategy, folder):
    """Every batch of a generator is trained once."""
    everything = list(range(BATCHES))
    assert fit(strategy, batches()) == [everything]
    built = make_model(strategy, built=True)
    assert fit(strategy, batches(), built) == [everything]
    eager = make_model(strategy, run_eagerly=True)
    assert fit(strategy, batches(), eager) == [everything]
    epochs = fit(strategy, batches(), epochs=2, steps_per_epoch=3)
    assert epochs == [[0, 1, 2], [3, 4, 5]], epochs
    assert fit(strategy, batches(weights=True)) == [everything]
    model = make_model(strategy)
    history = model.fit(batches(), validation_data=batches(), verbose=0)
    assert history.history["val_loss"] == [10.5], history.history
    assert float(model.evaluate(batches(), verbose=0)) == 10.5
    shape = make_model(strategy).predict(batches(), verbose=0).shape
    assert shape == (4 * BATCHES, 1), shape


def datasets_of_generators(strategy, folder):
    """So is every batch of a dataset that reads a generator, or files."""
    source = batches()
    spec = (tf.TensorSpec([None, 16]), tf.TensorSpec([None, 1]))
    dataset = tf.data.Dataset.from_generator(
        lambda: source, output_signature=spec
    )
    assert fit(strategy, dataset) == [list(range(BATCHES))]
    if KERAS_3:

        class Data(keras.utils.PyDataset):
            def __len__(self):
                return BATCHES

            def __getitem__(self, index):
                return list(batches())[index]

        assert fit(strategy, Data(), epochs=2) == [list(range(BATCHES))] * 2


def fewer_samples_than_ranks(strategy, folder):
    """A rank of which it is known that it never has samples takes part."""
    ones = np.ones([BATCHES, 16], np.float32)
    labels = 2.0 ** np.arange(BATCHES, dtype=np.float32)[:, np.newaxis]
    data = tf.data.Dataset.from_tensor_slices((ones, labels))
    every = list(range(BATCHES))
    dataset = data.batch(1, drop_remainder=True)
    assert fit(strategy, dataset) == [every]
    assert fit(strategy, ones[:1], y=labels[:1]) == [[0]]
    model = make_model(strategy)
    assert float(model.evaluate(dataset, verbose=0)) == 10.5


def names_return(strategy, folder):
    """A program may make any number of datasets: each has buffers."""
    data = tf.data.Dataset.range(8).batch(4)
    for _ in range(80):
        strategy.experimental_distribute_dataset(data)
    labels = strategy.statistics()["labels"]
    names = [label for label in labels if label.endswith("/cardinality")]
    assert 0 < len(names) <= 64, len(names)


def shapes_that_only_data_tell(strategy, folder):
    """A dataset that does not know its shapes is read, as Keras does."""
    data = tf.data.Dataset.from_tensor_slices(np.ones([8, 16], np.float32))
    data = data.batch(4).map(
        lambda x: (tf.py_function(lambda v: v, [x], tf.float32), x[:, :1])
    )
    data = data.map(lambda x, y: (tf.ensure_shape(x, [None, None]), y))
    if KERAS_3:  # tf_keras cannot build such a model
        assert fit(strategy, data) == [[1]]


def arrays_stay(strategy, folder):
    """Arrays and files of the user's are as before, after training."""
    raw = np.zeros(64 * 64 + 64, np.uint8)
    aligned = raw[-raw.ctypes.data % 64 :][: 64 * 64].view(np.float32)
    path = folder / f"rows{strategy.rank}.npy"
    np.save(path, np.random.default_rng(0).random([64, 16], np.float32))
    arrays = [
        aligned.reshape(64, 16),
        np.load(path, mmap_mode="r"),
        np.load(path, mmap_mode="r+"),
    ]
    for array in arrays:
        before = array.copy()

        def source(array=array):
            for start in range(0, 64, 16):
                yield array[start : start + 16], array[start : start + 16, :1]

        spec = (tf.TensorSpec([None, 16]), tf.TensorSpec([None, 1]))
        dataset = tf.data.Dataset.from_generator(source, output_signature=spec)
        model = make_model(strategy, loss="mse")
        model.fit(dataset.repeat(), steps_per_epoch=20, verbose=0)
        model.fit(source(), verbose=0)
        np.testing.assert_array_equal(array, before)
        for weight in model.get_weights():
            assert np.isfinite(weight).all()


def fails(function, *words):
    """Runs what must fail with these words, on every rank."""
    try:
        function()
    except Exception as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, (missing, str(error))
        return
    raise AssertionError(f"no error with {words}")


def other_settings(strategy, folder):
    """Ranks that call `fit` with other settings learn which, and go on."""
    first = strategy.rank == 0
    x, y = np.ones([8, 16], np.float32), np.ones([8, 1], np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    models = [make_model(strategy) for _ in range(3)]
    models[0].optimizer.learning_rate = 0.1 if first else 0.2
    rate = "learning_rate: 0.1000", "(rank 0), 0.2000", "(rank 1)"
    fails(lambda: models[0].fit(data, verbose=0), *rate)
    models[1].compile("sgd", "mse" if first else "mae")
    fails(
        lambda: models[1].evaluate(data, verbose=0),
        "`evaluate` with different settings",
        "loss: 'mse' (rank 0), 'mae' (rank 1)",
    )
    epochs = 2 if first else 3
    fails(
        lambda: models[2].fit(data, epochs=epochs, verbose=0),
        "epochs: 2 (rank 0), 3 (rank 1)",
    )
    rows = x[: 8 if first else 6]
    fails(
        lambda: models[2].predict(rows, verbose=0),
        "x: float32[8, 16] (rank 0), float32[6, 16] (rank 1)",
    )
    fails(
        lambda: models[2].fit(x, y, batch_size=epochs, verbose=0),
        "batch_size: 2 (rank 0), 3 (rank 1)",
    )
    # What only one rank wants to see does not count.
    model = make_model(strategy)
    callbacks = [Trained()] if first else []
    model.fit(data, verbose=2 if first else 0, callbacks=callbacks)


def other_vocabularies(strategy, folder):
    """The order of a set of strings is another on every rank."""
    words = ["a", "b", "c"]
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            keras.layers.StringLookup(
                vocabulary=words if strategy.rank else words[::-1], name="words"
            ),
            keras.layers.Rescaling(0.1),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model = keras.models.clone_model(model)
        model.compile("sgd", "mse")
    x, y = tf.constant([["a"], ["b"]]), np.ones([2, 1], np.float32)
    fails(lambda: model.fit(x, y, verbose=0), "vocabulary of words: 4 #")
    model.get_layer("words").set_vocabulary(words)
    model.fit(x, y, verbose=0)


def other_data(strategy, folder):
    """So do ranks that read other data, or in another order."""
    rank = strategy.rank
    x = np.arange(64 * 16, dtype=np.float32).reshape(64, 16) / 1000
    y = np.arange(64).reshape(64, 1) % 7
    order = np.random.default_rng(rank).permutation(64)
    model = make_model(strategy, loss="mse")

    def dataset(x, y, batch=8):
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)

    different = "The ranks read different data"
    order_differs = dataset(x[order], y[order])
    fails(lambda: model.fit(order_differs, verbose=0), different, "'0', '1'")
    fails(lambda: model.fit(x[order], y[order], verbose=0), different)
    fails(lambda: model.fit(dataset(x, y, 8 + rank), verbose=0), different)
    rows = 64 - 8 * rank
    shorter = dataset(x[:rows], y[:rows])
    fails(lambda: model.fit(shorter, verbose=0), different, "[8, 7]")

    def shuffled():
        own = np.random.default_rng(rank).permutation(64)
        for start in range(0, 64, 8):
            yield x[own[start : start + 8]], y[own[start : start + 8]]

    fails(lambda: model.fit(shuffled(), verbose=0), different)
    # By arrays, or with seeds of the strategy's, all is as it should be.
    model.fit(x, y, epochs=2, verbose=0)
    model.fit(dataset(x, y).shuffle(8), epochs=2, verbose=0)

    def blur(x, y):
        return x + tf.random.normal(tf.shape(x)), y

    blurred = dataset(x, y).map(blur, num_parallel_calls=4)
    model.fit(blurred, epochs=2, verbose=0)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    model.fit(order_differs.with_options(options), verbose=0)


def no_data(strategy, folder):
    """No batch at all is said so; batches of no samples are as any other."""
    x, y = np.zeros([0, 16], np.float32), np.zeros([0, 1], np.float32)
    empty = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    model = make_model(strategy, built=True)
    if KERAS_3:  # as in one process without a strategy
        assert model.fit(empty, verbose=0).history == {}
        assert make_model(strategy).evaluate(empty, verbose=0) == []
        fails(lambda: model.predict(x, verbose=0), "`predict` got no batch")
    else:
        fails(lambda: model.fit(empty, verbose=0), "to be non-empty")
        fails(lambda: model.fit(iter([]), verbose=0), "`fit` got no batch")
    one = tf.data.Dataset.from_tensors((x, y))
    assert model.predict(one, verbose=0).shape == (0, 1)
