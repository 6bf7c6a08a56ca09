# SPDX-License-Identifier: Apache-2.0
"""Batches of zero samples, for ranks that have no data left."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def like(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Endless batches of zero samples, shaped like the dataset's.

    Args:
        dataset: of tensors, RaggedTensors, SparseTensors, Keras's None and
            values whose spec has `empty()`, as `PrefetchedIds`.

    Raises:
        ValueError: at a tensor of unknown rank.
    """
    elements = tf.nest.map_structure(_empty, dataset.element_spec)
    return tf.data.Dataset.from_tensors(elements).repeat()


def _empty(spec: Any) -> Any:
    if hasattr(spec, "empty"):
        return spec.empty()
    if isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    if isinstance(spec, tf.RaggedTensorSpec):
        return _empty_ragged(spec)
    if spec.shape.rank is None:
        raise ValueError(
            "The ranks have different numbers of batches and an element "
            f"of unknown rank cannot be padded. Received: spec={spec}. "
            "Set the shapes in the input pipeline."
        )
    if isinstance(spec, tf.SparseTensorSpec):
        shape = _without_samples(spec.shape)
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64),
            tf.zeros([0], spec.dtype),
            tf.constant(shape, tf.int64),
        )
    shape = _without_samples(spec.shape) if spec.shape else []
    if spec.dtype == tf.string:
        return tf.fill(shape, "")
    return tf.zeros(shape, spec.dtype)


def _empty_ragged(spec: tf.RaggedTensorSpec) -> tf.RaggedTensor:
    flat = _without_samples(spec.shape[spec.ragged_rank :])
    ragged = tf.zeros(flat, spec.dtype)
    for _ in range(spec.ragged_rank):
        ragged = tf.RaggedTensor.from_row_splits(
            ragged, tf.zeros([1], spec.row_splits_dtype)
        )
    return ragged


def _without_samples(shape: tf.TensorShape) -> list[int]:
    return [0, *(size or 0 for size in shape[1:])]
