# SPDX-License-Identifier: Apache-2.0
"""Norms of the gradients of tables, in the steps for which they are wanted."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.callbacks.update_watch import Pairs
from tfdist_ext.callbacks.update_watch import UpdateWatch
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.duplicates import without_duplicates

_OF_THIS_RANK = {
    "trainable": False,
    "synchronization": tf.VariableSynchronization.NONE,
}


class GradientNorms:
    """Notes the squares of gradients, summed, of some variables.

    Args:
        watch: of the model.
        find: gives them, of TensorFlow or Keras, once the model is built.
        collectives: of the strategy; None in one process.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        find: Callable[[], Sequence[Any]],
        collectives: Collectives | None,
    ) -> None:
        self._collectives = collectives
        self._find = find
        self._places: dict[int, int] = {}
        self._wanted = tf.Variable(False, **_OF_THIS_RANK)
        self._squares: Any = None
        watch.add(self._around)

    def want(self, wanted: bool) -> None:
        """Says whether the steps that follow note them."""
        self._wanted.assign(wanted)

    def squares(self) -> Any:
        """float64 `[variables]`, of the last step that noted them.

        Where a variable is a part of a table, those of this rank's part. 0
        before the first step.
        """
        if self._squares is None:
            return np.zeros([len(self._find())])
        return self._squares.numpy()

    def _around(
        self, watch: UpdateWatch, pairs: Pairs, update: Callable[[], Any]
    ) -> Any:
        if self._squares is None:
            variables = self._find()
            self._places = {id(value_of(v)): i for i, v in enumerate(variables)}
            with tf.init_scope():
                zeros = tf.zeros([len(variables)], tf.float64)
                self._squares = tf.Variable(zeros, **_OF_THIS_RANK)

        def note() -> bool:
            squares = [tf.zeros([], tf.float64)] * len(self._places)
            for gradient, variable in pairs:
                place = self._places.get(id(value_of(variable)))
                if place is not None:
                    squares[place] = self._square(gradient)
            self._squares.assign(tf.stack(squares))
            return True

        tf.cond(self._wanted, note, lambda: True)
        return update()

    def _square(self, gradient: Any) -> tf.Tensor:
        if marks.gradient_spec(gradient) is None:
            gradient = self._of_all_ranks(gradient)
        gradient = without_duplicates(gradient)
        values = getattr(gradient, "values", gradient)
        # Squares of what diverges soon leave float32.
        return tf.reduce_sum(tf.square(tf.cast(values, tf.float64)))

    def _of_all_ranks(self, gradient: Any) -> Any:
        """The gradient of a variable that every rank holds whole."""
        collectives = self._collectives
        if collectives is None:
            return gradient
        label = "gradient norms of tables"
        if not isinstance(gradient, tf.IndexedSlices):
            return collectives.all_reduce([gradient], label, weighted=True)[
                0
            ] / float(collectives.group.world_size)
        share = collectives.share_of_samples(label)
        assert share is not None
        part = share / collectives.group.world_size
        values = gradient.values * tf.cast(part, gradient.values.dtype)
        return tf.IndexedSlices(
            collectives.all_gather(values, f"{label}/rows"),
            collectives.all_gather(gradient.indices, f"{label}/indices"),
            gradient.dense_shape,
        )
