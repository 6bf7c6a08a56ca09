# SPDX-License-Identifier: Apache-2.0
"""Gathers at once what the compiled losses of several outputs are given."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext import keras_objects
from tfdist_ext.batches import whole_batch
from tfdist_ext.keras_training import decomposing
from tfdist_ext.keras_training import whole_values

keras = tf.keras
Nest = Any


def gather_first(
    original: Any,
    model: Any,
    x: Nest = None,
    y: Nest = None,
    y_pred: Nest = None,
    sample_weight: Nest = None,
    *training: Any,
    **kwargs: Any,
) -> Any:
    step = whole_batch.keras_step()
    if step is not None:
        given = [
            (loss, (labels, predictions, sample_weight))
            for loss, labels, predictions in keras_objects.compiled_losses(
                model, y, y_pred
            )
            if not decomposing.is_loss_local(
                loss, labels, predictions, sample_weight
            )
        ]
        if len(given) > 1:  # one alone gathers all that it needs at once
            who = ", ".join(
                whole_values.describe("Loss", loss) for loss, _ in given
            )
            whole_values.whole(step, who, [values for _, values in given])
    return original(model, x, y, y_pred, sample_weight, *training, **kwargs)
