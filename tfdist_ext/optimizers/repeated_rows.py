# SPDX-License-Identifier: Apache-2.0
"""Rows that several calls of a layer have looked up, for rules of Keras 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.optimizers.duplicates import without_duplicates


def sum_repeated_rows(
    original: Any, optimizer: Any, grads: Sequence[Any], *args: Any, **kw: Any
) -> Any:
    """Sums what several calls give to a row, as several ranks do.

    A tape concatenates the gradients, and Keras 3 would square each.
    """
    return original(optimizer, list(map(_summed, grads)), *args, **kw)


def _summed(grad: Any) -> Any:
    if not (isinstance(grad, tf.IndexedSlices) and marks.is_unique(grad)):
        return grad
    if marks.gradient_spec(grad) is not None:  # of a shard: summed with others
        return grad
    if tf.is_symbolic_tensor(grad.indices):
        # Of one call, every row is there once.
        calls = grad.indices.op.type.startswith("Concat")
        return without_duplicates(grad) if calls else grad
    return without_duplicates(grad)
