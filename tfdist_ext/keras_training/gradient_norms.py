# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients in a Keras step count all shards of a table.

`tf.linalg.global_norm`, `tf.clip_by_global_norm` and `tf.clip_by_norm` would
take the norm of this rank's shard, which differs between the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.optimizers.clipping import square_norms
from tfdist_ext.optimizers.duplicates import without_duplicates


def global_norm(original: Any, t_list: Sequence[Any], name: Any = None) -> Any:
    if not _has_shards(t_list):
        return original(t_list, name)
    return tf.sqrt(tf.add_n(_squares(t_list)))


def clip_by_global_norm(
    original: Any,
    t_list: Sequence[Any],
    clip_norm: Any,
    use_norm: Any = None,
    name: Any = None,
) -> Any:
    if use_norm is None and _has_shards(t_list):
        use_norm = tf.sqrt(tf.add_n(_squares(t_list)))
    return original(t_list, clip_norm, use_norm, name)


def clip_by_norm(
    original: Any, t: Any, clip_norm: Any, axes: Any = None, name: Any = None
) -> Any:
    if axes is not None or not _has_shards([t]):
        return original(t, clip_norm, axes, name)
    norm = tf.sqrt(_squares([t])[0])
    limit = tf.cast(clip_norm, norm.dtype)
    factor = tf.cast(limit / tf.maximum(norm, limit), t.values.dtype)
    return tf.IndexedSlices(t.values * factor, t.indices, t.dense_shape)


def _has_shards(gradients: Any) -> bool:
    collectives = collectives_lib.active()
    step = collectives.step if collectives else None
    return bool(step and step.weighted) and any(
        marks.gradient_spec(gradient) is not None for gradient in gradients
    )


def _squares(gradients: Sequence[Any]) -> list[tf.Tensor]:
    given = [gradient for gradient in gradients if gradient is not None]
    return square_norms(
        list(map(without_duplicates, given)),
        list(map(marks.gradient_spec, given)),
    )
