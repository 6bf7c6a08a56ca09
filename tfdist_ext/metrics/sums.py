# SPDX-License-Identifier: Apache-2.0
"""A metric whose state is a vector of sums over samples."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.type_names import Config
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import TensorLike

keras = tf.keras


class Sums(keras.metrics.Metric):  # type: ignore[name-defined]
    """Adds up a vector for each batch, of all batches or of the last ones.

    With a window, the state has a row for each of the last batches, the newest
    first. Every update moves the rows, also on a rank without samples. Row i of
    each rank therefore belongs to the same batch, and the sum of the states of
    all ranks is the state of one process.

    Subclasses define `update_state`, which calls `add`, and `result`. They are
    marked with `marks.sums_over_samples`.

    Args:
        size: length of the vector.
        window: number of batches; None for all since the last reset.
        name: name of the metric.
        dtype: dtype of the result.
        state_dtype: dtype of the sums.
    """

    def __init__(
        self,
        size: int,
        window: int | None,
        name: str,
        dtype: DTypeLike,
        state_dtype: str = "float64",
    ) -> None:
        super().__init__(name=name, dtype=dtype)
        self.window = checked_window(window, name)
        shape = (size,) if self.window is None else (self.window, size)
        self._shape = shape
        self._state_dtype = tf.as_dtype(state_dtype)
        self._sums = self.add_weight(
            name="sums", shape=shape, initializer="zeros", dtype=state_dtype
        )

    def add(self, parts: tf.Tensor) -> None:
        """Adds the sums of a batch.

        Args:
            parts: `[size]`.
        """
        parts = tf.cast(parts, self._state_dtype)
        if self.window is None:
            self._sums.assign_add(parts)
            return
        before = tf.convert_to_tensor(self._sums)[:-1]
        self._sums.assign(tf.concat([parts[tf.newaxis], before], axis=0))

    def totals(self) -> tf.Tensor:
        """The sums, `[size]`, of the batches that count."""
        sums = tf.convert_to_tensor(self._sums)
        return sums if self.window is None else tf.reduce_sum(sums, axis=0)

    def finished(self, value: tf.Tensor) -> tf.Tensor:
        """The value in the dtype of the metric's results."""
        return tf.cast(value, self.dtype)

    def reset_state(self) -> None:
        """Sets all sums to zero."""
        self._sums.assign(tf.zeros(self._shape, self._state_dtype))

    def get_config(self) -> Config:
        """The arguments that create this metric."""
        config: Config = super().get_config()
        return config | {"window": self.window}


def checked_window(window: int | None, name: str) -> int | None:
    """Checks the argument `window` of a metric.

    Raises:
        ValueError: it is neither None nor a positive integer.
    """
    if window is None:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            "Argument `window` must be a number of batches, at least 1, or "
            f"None for all batches. Received: window={window!r} (metric "
            f"'{name}')."
        )
    return window


def checked_count(argument: str, value: int, least: int, name: str) -> int:
    """Checks an argument of a metric that counts something.

    Raises:
        ValueError: it is not an integer, or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"Argument `{argument}` must be an integer, at least {least}. "
            f"Received: {argument}={value!r} (metric '{name}')."
        )
    return value


def flat_samples(
    y_true: TensorLike,
    y_pred: TensorLike,
    sample_weight: TensorLike,
    from_logits: bool = False,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Labels, probabilities and weights, float64 `[n]`.

    Args:
        y_true: labels, of as many elements as `y_pred`.
        y_pred: probabilities or logits, of any shape.
        sample_weight: None, or the shape of `y_pred` or of its first
            dimensions.
        from_logits: whether `y_pred` are logits.
    """
    y_pred = tf.cast(y_pred, tf.float64)
    if from_logits:
        y_pred = tf.sigmoid(y_pred)
    y_true = tf.cast(y_true, tf.float64)
    if sample_weight is None:
        weights = tf.ones_like(y_pred)
    else:
        weights = tf.cast(sample_weight, tf.float64)
        missing = (y_pred.shape.rank or 0) - (weights.shape.rank or 0)
        if missing < 0:
            weights = tf.reshape(weights, tf.shape(y_pred))
        elif weights.shape.rank:
            weights = weights[(..., *[tf.newaxis] * missing)]
        weights = tf.broadcast_to(weights, tf.shape(y_pred))
    flat = (tf.reshape(each, [-1]) for each in (y_true, y_pred, weights))
    y_true, y_pred, weights = flat
    return y_true, y_pred, weights
