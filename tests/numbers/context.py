# SPDX-License-Identifier: Apache-2.0
"""What a program builds on: data, layers and `fit`, the same everywhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.layers import Embedding

keras = tf.keras
KERAS_3 = hasattr(keras, "ops")
BATCH, FEATURES, ROWS, IDS, UNITS = 8, 6, 30, 3, 4
SIZES = {"even": (8, 8), "uneven": (8, 8, 5, 1)}


class Context:
    """One setting of a program, in one process or on one of several ranks.

    Args:
        strategy: ours; None for one process of stock Keras.
        tables: whether the first layer is a table.
        batches: "even" or "uneven".
        folder: where the program may write.
    """

    def __init__(
        self, strategy: Any, tables: bool, batches: str, folder: Any
    ) -> None:
        self.strategy = strategy
        self.tables = tables
        self.even = batches == "even"
        self.sizes = SIZES[batches]
        self.samples = sum(self.sizes)
        self.folder = folder
        self._embeddings: list[Any] = []
        self._seed = 0
        # Of the tables, and whether a batch of `x` has an id only once.
        self.placement, self.distinct = "row", False

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """The scope of the strategy, if there is one."""
        if self.strategy is None:
            return contextlib.nullcontext()
        return self.strategy.scope()

    def seed(self) -> int:
        """Another number at every call, the same in every process."""
        self._seed += 1
        return self._seed

    def normal(self, *shape: int, seed: int = 0) -> np.ndarray:
        """float32 numbers, one set for every seed."""
        rng = np.random.default_rng(seed)
        return rng.normal(size=shape).astype(np.float32)

    def integers(self, high: int, *shape: int, seed: int = 0) -> np.ndarray:
        """int32 numbers in [0, high)."""
        rng = np.random.default_rng(seed)
        return rng.integers(0, high, shape).astype(np.int32)

    def x(self, seed: int = 1, samples: int | None = None) -> np.ndarray:
        """Inputs of `model`: ids for a table, or numbers."""
        count = samples or self.samples
        if self.tables and self.distinct:
            rng = np.random.default_rng(seed)
            rows = [rng.permutation(ROWS)[: n * IDS] for n in self.sizes]
            return np.concatenate(rows).reshape(-1, IDS).astype(np.int32)
        if self.tables:
            return self.integers(ROWS, count, IDS, seed=seed)
        return self.normal(count, FEATURES, seed=seed)

    def data(
        self, outputs: int = 2, kind: str = "numbers", weights: bool = False
    ) -> tf.data.Dataset:
        """Batches of inputs and labels, and of sample weights.

        Args:
            outputs: columns of the labels; classes, where these are asked.
            kind: "numbers", "positive", "binary", "signs", "simplex",
                "one_hot" or "classes".
            weights: whether each sample has one.
        """
        arrays = (self.x(), self.labels(outputs, kind))
        if weights:
            arrays = (*arrays, np.abs(self.normal(self.samples, seed=5)) + 0.1)
        return self.batched(arrays)

    def labels(self, outputs: int = 2, kind: str = "numbers") -> np.ndarray:
        """Labels of all samples; see `data`."""
        y = self.normal(self.samples, outputs, seed=2)
        if kind == "positive":
            return np.abs(y) + 0.1
        if kind == "binary":
            return (y > 0).astype(np.float32)
        if kind == "signs":
            return np.where(y > 0, 1, -1).astype(np.float32)
        if kind == "simplex":
            return np.exp(y) / np.exp(y).sum(-1, keepdims=True)
        if kind == "one_hot":
            return np.eye(outputs, dtype=np.float32)[y.argmax(-1)]
        if kind == "classes":
            return y.argmax(-1).astype(np.int32)
        assert kind == "numbers", kind
        return y

    def batched(self, arrays: Any, repeat: int = 1) -> tf.data.Dataset:
        """The global batches of a nest of arrays, in order."""
        whole = tf.data.Dataset.from_tensor_slices(arrays)
        if self.even:
            return whole.batch(BATCH, drop_remainder=True).repeat(repeat)
        parts, start = [], 0
        for size in self.sizes:
            parts.append(whole.skip(start).take(size).batch(size))
            start += size
        result = parts[0]
        for part in parts[1:]:
            result = result.concatenate(part)
        return result.repeat(repeat)

    def dense(self, units: int, activation: Any = None, **how: Any) -> Any:
        """A dense layer with weights that every process has."""
        start = keras.initializers.GlorotUniform(seed=self.seed())
        how.setdefault("kernel_initializer", start)
        return keras.layers.Dense(units, activation, **how)

    def embedding(
        self, rows: int = ROWS, units: int = UNITS, **how: Any
    ) -> Any:
        """A table: Keras's in one process, partitioned at ranks of ours."""
        table = self.normal(rows, units, seed=100 + self.seed())
        how["embeddings_initializer"] = keras.initializers.Constant(table)
        if self.strategy is None or not self.tables:
            layer = keras.layers.Embedding(rows, units, **how)
        else:
            how.setdefault("sharding", self.placement)
            layer = Embedding(rows, units, **how)
        if self.tables:
            self._embeddings.append(layer)
        return layer

    def input(self) -> Any:
        """The input of a functional model, for what `x` gives."""
        if self.tables:
            return keras.Input([IDS], dtype="int32")
        return keras.Input([FEATURES])

    def features(self, inputs: Any) -> Any:
        """Numbers of each sample, looked up where inputs are ids."""
        if not self.tables:
            return inputs
        return keras.layers.Flatten()(self.embedding()(inputs))

    def model(
        self,
        outputs: int = 2,
        activation: Any = None,
        kind: Callable[..., Any] | None = None,
        hidden: int = 8,
        between: Callable[[], Any] | None = None,
        **how: Any,
    ) -> Any:
        """A model of one hidden layer.

        Args:
            outputs: units of the last layer.
            activation: of the last layer.
            kind: a subclass of `keras.Model`.
            hidden: units of the hidden layer.
            between: makes a layer after the hidden one.
            **how: of the last layer.
        """
        with self.scope():
            inputs = self.input()
            x = self.dense(hidden, "tanh")(self.features(inputs))
            if between is not None:
                x = between()(x)
            y = self.dense(outputs, activation, **how)(x)
            return (kind or keras.Model)(inputs, y)

    def train(
        self,
        model: Any,
        data: Any,
        loss: Any = None,
        optimizer: Callable[[], Any] | None = None,
        metrics: Callable[[], Any] | None = None,
        weighted_metrics: Callable[[], Any] | None = None,
        fit: dict[str, Any] | None = None,
        evaluate: bool = True,
        predict: bool = False,
        **compiled: Any,
    ) -> dict[str, Any]:
        """Compiles, fits and evaluates; returns all that must agree.

        Args:
            model: to train.
            data: of `fit` and `evaluate`.
            loss: of `compile`.
            optimizer: makes it; SGD by default.
            metrics: makes them.
            weighted_metrics: makes them.
            fit: more arguments of `fit`.
            evaluate: whether to evaluate as well.
            predict: whether to predict as well.
            **compiled: more arguments of `compile`.
        """
        with self.scope():
            made = optimizer() if optimizer else keras.optimizers.SGD(0.1)
            if metrics:
                compiled["metrics"] = metrics()
            if weighted_metrics:
                compiled["weighted_metrics"] = weighted_metrics()
            if KERAS_3:
                compiled.setdefault("jit_compile", False)
            model.compile(made, loss, **compiled)
        history = model.fit(data, verbose=0, shuffle=False, **(fit or {}))
        found = {f"fit/{k}": v for k, v in history.history.items()}
        if evaluate:
            found |= self.evaluated(model, data)
        if predict:
            found |= self.predicted(model, data)
        return found | self.weights(model)

    def evaluated(self, model: Any, data: Any) -> dict[str, Any]:
        """What `evaluate` returns."""
        values = model.evaluate(data, verbose=0, return_dict=True)
        return {f"evaluate/{name}": value for name, value in values.items()}

    def predicted(self, model: Any, data: Any) -> dict[str, Any]:
        """What `predict` returns for the inputs of data."""
        inputs = data.map(lambda x, *_: x)
        flat = tf.nest.flatten(model.predict(inputs, verbose=0))
        return {f"predict/{i}": each for i, each in enumerate(flat)}

    def plain_weights(self, model: Any) -> list[Any]:
        """The weights of a model that are no tables."""
        tables = {id(w) for layer in self._embeddings for w in layer.weights}
        return [w for w in model.weights if id(w) not in tables]

    def weights(self, *models: Any) -> dict[str, Any]:
        """All weights of models, and whole tables."""
        found = {}
        for number, model in enumerate(models):
            for index, weight in enumerate(self.plain_weights(model)):
                found[f"weight/{number}/{index}"] = np.array(weight)
        used = [layer for layer in self._embeddings if layer.weights]
        for index, layer in enumerate(used):
            whole = layer.weights[0]
            if self.strategy is not None:
                whole = self.strategy.gather_table(layer)
            found[f"table/{index}"] = np.array(whole)
        return found
