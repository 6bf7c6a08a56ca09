# SPDX-License-Identifier: Apache-2.0
"""Weights of ids are data: no gradient goes back to what computes them.

A gradient that is not there would be taken for zero, and layers in front
would stay as they are without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.batches.ids import Ids


def refuse_gradient(
    result: tf.Tensor, lists: Sequence[Ids], feature: str
) -> tf.Tensor:
    """A result whose gradient by the weights of its ids is an error.

    Args:
        result: of a lookup.
        lists: what was looked up, with or without weights.
        feature: its name, for the error.

    Returns:
        The result. Where TensorFlow needs the gradient of a weight, it raises
        a LookupError.
    """
    for each in lists:
        if each.weights.shape.num_elements() != 0:
            weights = tf.raw_ops.PreventGradient(
                input=each.weights,
                message=f"the weights of the ids of '{feature}' are data, and "
                "what computes them is not trained: use "
                "tf.stop_gradient(weights), or multiply looked-up rows.",
            )
            result = _connected(result, weights)
    return result


@tf.custom_gradient
def _connected(
    result: tf.Tensor, weights: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
    """The result, of which the weights are an input to the tape."""

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return upstream, tf.zeros_like(weights)

    return tf.identity(result), gradient
