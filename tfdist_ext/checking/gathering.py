# SPDX-License-Identifier: Apache-2.0
"""The whole batch of a step, on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.checking.skipping import CannotCheck
from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives.collectives import Collectives

Nest = Any


def whole_batch_of(batch: Nest, collectives: Collectives) -> Nest:
    """The ranks' batches one after the other; all ranks must call.

    Args:
        batch: of this rank: tensors, ragged and sparse ones, in any nest.
        collectives: of the strategy.

    Returns:
        The same nest of the samples of all ranks, in the order of the ranks.

    Raises:
        CannotCheck: for a batch with something that cannot be gathered.
    """
    flat = tf.nest.flatten(batch)
    gathered = [_gather(value, i, collectives) for i, value in enumerate(flat)]
    return tf.nest.pack_sequence_as(batch, gathered)


def signature_of(batch: Nest) -> Nest:
    """Type specs of a batch, of any number of samples.

    Args:
        batch: as `whole_batch_of` returns it.
    """
    return tf.nest.map_structure(_open_spec, batch)


def _open_spec(value: Any) -> Any:
    spec = tf.type_spec_from_value(value)
    if isinstance(value, tf.experimental.Optional) or spec.shape.rank == 0:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)


def _gather(value: Any, index: int, collectives: Collectives) -> Any:
    label = f"check/batch/{index}"
    if isinstance(value, tf.RaggedTensor):
        return _ragged(value, label, collectives)
    if isinstance(value, tf.SparseTensor):
        return _sparse(value, label, collectives)
    if isinstance(value, tf.experimental.Optional):  # Keras 3's None
        return value
    if not tf.is_tensor(value) or not hasattr(value, "dtype"):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__}, "
            "which cannot be gathered"
        )
    if value.shape.rank == 0:
        return value
    if not isinstance(value, tf.Tensor) or not any_dtype.is_known(value.dtype):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__} of "
            f"{value.dtype!r}, which cannot be gathered"
        )
    return any_dtype.all_gather(collectives, value, label)[0]


def _ragged(
    value: tf.RaggedTensor, label: str, collectives: Collectives
) -> tf.RaggedTensor:
    lengths = collectives.all_gather(value.row_lengths(), f"{label}/lengths")
    inner = value.values
    if isinstance(inner, tf.RaggedTensor):
        values: Any = _ragged(inner, f"{label}/values", collectives)
    else:
        values, _ = any_dtype.all_gather(collectives, inner, f"{label}/values")
    return tf.RaggedTensor.from_row_lengths(values, lengths)


def _sparse(
    value: tf.SparseTensor, label: str, collectives: Collectives
) -> tf.SparseTensor:
    shapes = collectives.all_gather(
        value.dense_shape[tf.newaxis], f"{label}/shapes"
    )
    rows = shapes[:, 0]
    first = tf.reduce_sum(rows[: collectives.group.rank])
    others = tf.zeros_like(value.dense_shape[1:])
    indices = value.indices + tf.concat([first[tf.newaxis], others], 0)
    shape = tf.concat(
        [tf.reduce_sum(rows)[tf.newaxis], tf.reduce_max(shapes[:, 1:], 0)], 0
    )
    values, _ = any_dtype.all_gather(
        collectives, value.values, f"{label}/values"
    )
    return tf.SparseTensor(
        collectives.all_gather(indices, f"{label}/indices"), values, shape
    )
