# SPDX-License-Identifier: Apache-2.0
"""Metrics in Keras's loops on ranks, against their definitions."""

import warnings

import metric_references as references
import numpy as np
import pytest
import tensorflow as tf
from fit_models import Logs

from tfdist_ext import metrics

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
# The last batch has one sample, so that some ranks have none.
SAMPLES, BATCH, GROUPS, ITEMS, K, WINDOW = 33, 8, 5, 20, 4, 2
BUCKETS = 16


def data():
    """Columns of samples; predictions tie, and some queries want nothing."""
    rng = np.random.default_rng(5)
    chances = rng.integers(1, BUCKETS, SAMPLES) / BUCKETS
    labels = (rng.random(SAMPLES) < chances).astype(np.float32)
    found = np.stack([rng.permutation(ITEMS)[:6] for _ in range(SAMPLES)])
    relevant = np.stack([rng.permutation(ITEMS)[:8] for _ in range(SAMPLES)])
    relevant[np.arange(8) >= rng.integers(0, 9, [SAMPLES, 1])] = -1
    weights = rng.integers(0, 4, SAMPLES).astype(np.float32)
    weights[-1] = 2.0
    return {
        "label": labels,
        "chance": chances.astype(np.float32),
        "weight": weights,
        "group": rng.integers(0, GROUPS, SAMPLES),
        "found": found,
        "relevant": relevant,
    }


def _of_predictions(prefix, window=None):
    more = {"window": window}
    return {
        "ne": metrics.NormalizedEntropy(name=f"{prefix}ne", **more),
        "calibration": metrics.Calibration(name=f"{prefix}cal", **more),
        "ece": metrics.ExpectedCalibrationError(5, name=f"{prefix}ece", **more),
    }


def _of_found(prefix, window=None):
    more = {"window": window}
    return {
        "recall": metrics.RecallAtK(K, name=f"{prefix}recall", **more),
        "hit": metrics.HitAtK(K, name=f"{prefix}hit", **more),
        "mrr": metrics.MRRAtK(K, name=f"{prefix}mrr", **more),
        "ndcg": metrics.NDCGAtK(K, name=f"{prefix}ndcg", **more),
        "coverage": metrics.ItemCoverageAtK(
            ITEMS, K, name=f"{prefix}coverage", **more
        ),
    }


def _grouped(prefix, weightings, window=None):
    found = {}
    for weighting in weightings:
        name = f"{prefix}gauc_{weighting}"
        found[f"gauc {weighting}"] = metrics.GAUC(
            50, weighting, window, name=name
        )
        if window is None:
            found[f"buckets {weighting}"] = metrics.BucketedGAUC(
                GROUPS, BUCKETS, weighting, name=f"{name}_buckets"
            )
    return found


class Model(keras.Model):
    """Returns given predictions, and updates metrics of other inputs."""

    def __init__(self, sets):
        super().__init__()
        self.scale = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones"
        )
        self.sets = sets
        # Keras finds metrics in attributes.
        self.every = [m for each in sets for m in each["all"].values()]

    def call(self, x):
        return self.scale(x["chance"][:, tf.newaxis])

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        for each in self.sets:
            weight = x["weight"] if each["weighted"] else None
            for metric in each["predictions"].values():
                metric.update_state(y, y_pred, sample_weight=weight)
            for metric in each["found"].values():
                metric.update_state(x["relevant"], x["found"], weight)
            for metric in each["grouped"].values():
                metric.update_state(y, y_pred, weight, groups=x["group"])
        return super().compute_metrics(x, y, y_pred, sample_weight)


def _set(weighted, window, weightings):
    prefix = f"{weighted}_{window}_".lower()
    parts = {
        "predictions": _of_predictions(prefix, window),
        "found": _of_found(prefix, window),
        "grouped": _grouped(prefix, weightings, window),
    }
    every = {k: m for part in parts.values() for k, m in part.items()}
    return {"weighted": weighted, "window": window, "all": every, **parts}


def _expected(columns, key, weighted, window):
    if window is not None:
        start = (SAMPLES - 1) // BATCH * BATCH - (window - 1) * BATCH
        columns = {name: value[start:] for name, value in columns.items()}
    weights = columns["weight"] if weighted else np.ones(len(columns["label"]))
    given = (columns["label"], columns["chance"], weights)
    found = (columns["found"], weights, K)
    kind, _, weighting = key.partition(" ")
    if kind in ("ne", "calibration"):
        return getattr(references, kind)(*given)
    if kind == "ece":
        return references.ece(*given, 5)
    if kind == "coverage":
        return references.coverage(*found, ITEMS)
    if weighting:
        return references.gauc(*given, columns["group"], weighting)
    return references.ranking(kind, columns["relevant"], *found)


def in_evaluate(strategy, folder):
    """All metrics: of all batches, and of the last ones with weights."""
    columns = data()
    with strategy.scope():
        sets = [
            _set(False, None, ["samples", "groups"]),
            _set(True, WINDOW, ["positives"]),
        ]
        model = Model(sets)
        model.compile("sgd", "mse")
    labels = columns["label"][:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices((columns, labels))
    dataset = dataset.batch(BATCH)
    for _ in range(2):  # The second time begins with a reset.
        logs = model.evaluate(dataset, verbose=0, return_dict=True)
        for each in sets:
            for key, metric in each["all"].items():
                expected = _expected(
                    columns, key, each["weighted"], each["window"]
                )
                np.testing.assert_allclose(
                    logs[metric.name], expected, rtol=1e-6, err_msg=metric.name
                )


def _gathered(strategy):
    labels = strategy.statistics().get("labels", {})  # None in one process.
    return labels.get("losses/whole batch", [0])[0]


def in_compile(strategy, folder):
    """Metrics of predictions, given to `compile`, send no samples."""
    columns = data()
    with strategy.scope():
        inputs = keras.Input([1])
        output = keras.layers.Dense(
            1, use_bias=False, kernel_initializer="ones"
        )(inputs)
        model = keras.Model(inputs, output)
        plain, weighted = _of_predictions("all_"), _of_predictions("weighted_")
        model.compile(
            keras.optimizers.SGD(0.0),
            "mse",
            metrics=list(plain.values()),
            weighted_metrics=list(weighted.values()),
        )
    parts = [columns[name][:, np.newaxis] for name in ("chance", "label")]
    dataset = tf.data.Dataset.from_tensor_slices((*parts, columns["weight"]))
    before = _gathered(strategy)
    history = model.fit(dataset.batch(BATCH), epochs=2, verbose=0).history
    assert _gathered(strategy) == before
    for weights, found in ((False, plain), (True, weighted)):
        for key, metric in found.items():
            expected = _expected(columns, key, weights, None)
            np.testing.assert_allclose(
                history[metric.name], [expected] * 2, rtol=1e-6, err_msg=key
            )


def many_samples_are_refused(strategy, folder):
    """More samples than `GAUC` can store are an error on every rank."""
    columns = data()
    with strategy.scope():
        one = {"gauc": metrics.GAUC(20)}
        none = {"predictions": {}, "found": {}}
        model = Model([{"weighted": False, "all": one, "grouped": one, **none}])
        model.compile("sgd", "mse")
    labels = columns["label"][:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices((columns, labels))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"max_samples=20.*BucketedGAUC"
    ):
        model.evaluate(dataset.batch(BATCH), verbose=0)


def large_states(strategy, folder):
    """Only states that are summed are too large for the logs of steps."""
    columns = data()
    labels = columns["label"][:, np.newaxis]
    dataset = tf.data.Dataset.from_tensor_slices((columns, labels))
    given = (columns["label"], columns["chance"], np.ones(SAMPLES))
    expected = references.gauc(*given, columns["group"], "samples")
    for make, summed in (
        (lambda: metrics.GAUC(4000), False),
        (lambda: metrics.BucketedGAUC(1000, BUCKETS), True),
    ):
        with strategy.scope():
            one = {"gauc": make()}
            none = {"predictions": {}, "found": {}}
            model = Model(
                [{"weighted": False, "all": one, "grouped": one, **none}]
            )
            model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logs = model.evaluate(
                dataset.batch(BATCH), verbose=0, return_dict=True
            )
        np.testing.assert_allclose(logs["gauc"], expected, rtol=1e-6)
        told = [each for each in caught if "too many" in str(each.message)]
        assert bool(told) == (summed and KERAS_3 and strategy.world_size > 1)


class Searching(keras.Model):
    """Searches the full catalogue for the neighbour of each item."""

    def __init__(self, rows):
        super().__init__()
        from tfdist_ext.layers import Embedding
        from tfdist_ext.layers import ShardedTopK

        self.items = Embedding(
            *rows.shape,
            embeddings_initializer=keras.initializers.Constant(rows),
            sharding="row_wise",
        )
        self.index = ShardedTopK(k=K).index(self.items)

    def build(self, _=None):
        self.items.build(None)

    def call(self, ids):
        _, found = self.index.query_with_exclusions(
            self.items(ids), ids[:, tf.newaxis]
        )
        return found

    def compute_loss(self, x=None, y=None, y_pred=None, *_, **__):
        return tf.reduce_mean(tf.cast(x, tf.float32))


def of_a_search(strategy, folder):
    """Metrics of `compile` rank all rows of a table that is partitioned."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=[ITEMS, 3]).astype(np.float32)
    ids = np.arange(ITEMS)
    wanted = np.stack([(ids + 1) % ITEMS, (ids + 2) % ITEMS], axis=1)
    with strategy.scope():
        model = Searching(rows)
        used = {k: m for k, m in _of_found("").items() if k != "coverage"}
        model.compile("sgd", metrics=list(used.values()))
    dataset = tf.data.Dataset.from_tensor_slices((ids, wanted)).batch(7)
    logs = model.evaluate(dataset, verbose=0, return_dict=True)
    scores = rows @ rows.T
    np.fill_diagonal(scores, -np.inf)
    found = np.argsort(-scores, axis=1)
    for kind, metric in used.items():
        expected = references.ranking(kind, wanted, found, np.ones(ITEMS), K)
        np.testing.assert_allclose(logs[metric.name], expected, rtol=1e-6)


class Reading(keras.Model):
    """Reads metrics before, between and after updates of a step."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)
        self.twice = keras.metrics.Sum(name="twice")
        self.mean = keras.metrics.Mean(name="mean")
        self.late = keras.metrics.MeanSquaredError(name="late")

    def call(self, x):
        return self.scale(x)

    def train_step(self, data):
        x, y = data
        first = self.twice.result()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.twice.update_state(y)
        self.mean.update_state(y, sample_weight=y)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        second = self.twice.result()
        self.twice.update_state(2 * y)
        self.late.update_state(y, 0 * y)
        return {
            "first": first,
            "second": second,
            "third": self.twice.result(),
            "mean": self.mean.result(),
            "late": self.late.result(),
        }

    @property
    def metrics(self):
        return [self.twice, self.mean, self.late]


def _labels(rng):
    return rng.integers(1, 9, [SAMPLES, 1]).astype(np.float32)


def read_within_a_step(strategy, folder):
    """A result is that of the states when it is read, as in one process."""
    y = _labels(np.random.default_rng(4))
    with strategy.scope():
        model = Reading()
        model.compile(keras.optimizers.SGD(0.01))
    logs = Logs()
    dataset = tf.data.Dataset.from_tensor_slices((y, y)).batch(BATCH)
    model.fit(dataset, epochs=2, verbose=0, callbacks=[logs])
    ends = [*range(BATCH, SAMPLES, BATCH), SAMPLES]
    begins = [0, *ends[:-1]]
    expected = [
        {
            "first": 3 * y[:begin].sum(),
            "second": 3 * y[:begin].sum() + y[begin:end].sum(),
            "third": 3 * y[:end].sum(),
            "mean": (y[:end] ** 2).sum() / y[:end].sum(),
            "late": (y[:end] ** 2).mean(),
        }
        for begin, end in zip(begins, ends, strict=True)
    ]
    assert len(logs.seen) == 2 * len(expected)
    for found, each in zip(logs.seen, 2 * expected, strict=True):
        for key, value in each.items():
            np.testing.assert_allclose(found[key], value, 1e-6, err_msg=key)


def sums_share_exchanges(strategy, folder):
    """The loss is summed with the gradients, other metrics in one exchange."""
    y = _labels(np.random.default_rng(4))
    dataset = tf.data.Dataset.from_tensor_slices((y, y)).batch(BATCH)
    steps = len(dataset)

    def counts():
        labels = strategy.statistics().get("labels", {})
        return [labels.get(name, [0])[0] for name in ("gradients", "logs")]

    def counted(metrics, method):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("sgd", "mse", metrics=metrics)
        before = counts()
        getattr(model, method)(dataset, verbose=0)
        return [b - a for a, b in zip(before, counts(), strict=True)]

    steps *= strategy.world_size > 1
    assert counted([], "fit") == [steps, 0]
    assert counted(["mae", "AUC"], "fit") == [steps, steps]
    assert counted([], "evaluate") == [0, steps]
    assert counted(["mae", "AUC"], "evaluate") == [0, steps]


class Inner(keras.Model):
    """Updates a metric in a function of its own, before the gradients."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)
        self.seen = keras.metrics.Sum(name="seen")

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def add(self, values):
        self.seen.update_state(values)

    def call(self, x):
        return self.scale(x)

    def train_step(self, data):
        x, y = data[:2]
        self.add(y)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"seen": self.seen.result()}

    @property
    def metrics(self):
        return [self.seen]


def updated_in_a_function(strategy, folder):
    """A metric that a `tf.function` inside of the step updates."""
    y = _labels(np.random.default_rng(4))
    with strategy.scope():
        model = Inner()
        model.compile(keras.optimizers.SGD(0.01))
    for size in (BATCH, BATCH - 1, BATCH, BATCH - 2):
        batch = y[:size]
        model.reset_metrics()
        logs = model.train_on_batch(batch, batch, return_dict=True)
        assert float(logs["seen"]) == batch.sum()


class Running(keras.Model):
    """Returns a variable that a step assigns, and twice a metric's result."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)
        self.mean = keras.metrics.Mean(name="mean")
        self.running = self.add_weight(name="running", trainable=False)

    def call(self, x):
        return self.scale(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.mean.update_state(y)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.running.assign(tf.reduce_mean(y))
        running = tf.convert_to_tensor(self.running)
        mean = self.mean.result()
        return {"running": running, "mean": mean, "both": mean + running}

    @property
    def metrics(self):
        return [self.mean]


def beside_a_variable(strategy, folder):
    """A variable that a step assigns is averaged, metrics are not again."""
    y = _labels(np.random.default_rng(4))[: 4 * BATCH]
    with strategy.scope():
        model = Running()
        model.build([None, 1])
        model.compile(keras.optimizers.SGD(0.01))
    logs = Logs()
    dataset = tf.data.Dataset.from_tensor_slices((y, y)).batch(BATCH)
    model.fit(dataset, verbose=0, callbacks=[logs])
    for step, found in enumerate(logs.seen):
        running = y[step * BATCH : (step + 1) * BATCH].mean()
        mean = y[: (step + 1) * BATCH].mean()
        np.testing.assert_allclose(found["running"], running, 1e-6)
        np.testing.assert_allclose(found["mean"], mean, 1e-6)
        np.testing.assert_allclose(found["both"], mean + running, 1e-6)
