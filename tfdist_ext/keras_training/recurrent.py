# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers that keep states of samples are refused on several ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals

keras = tf.keras


def check(model: Any, ranks: int) -> None:
    """Refuses a model with stateful recurrent layers.

    Args:
        model: about to be trained, evaluated or asked to predict.
        ranks: their number, more than one.

    Raises:
        ValueError: naming the first such layer.
    """
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"Layer '{layer.name}' ({type(layer).__name__}) has "
                "stateful=True: it keeps a state for each sample of a batch of "
                f"fixed size. Each of the {ranks} ranks has a part of every "
                "batch only, so the states of one rank are not those of the "
                "batch. Use stateful=False (and pass states on by "
                "return_state=True and initial_state=...), or train this model "
                "in one process."
            )
