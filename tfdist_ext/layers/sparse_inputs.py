# SPDX-License-Identifier: Apache-2.0
"""The kinds of input a sparse layer takes, brought to one form (CSR)."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist_ext.embedding.feature import Ids

_IDS = (
    "int32 or int64 ids [batch] or [batch, k], a RaggedTensor of ids "
    "[batch, None]"
)
# Of FullSparse, and of layers whose ids are given as values.
_INPUTS = (
    f"a SparseTensor [batch, input_dim], {_IDS}, a pair (ragged ids, ragged "
    "float weights), or a list of these"
)
_VALUES = (
    f"{_IDS}, or a SparseTensor whose values are ids; weights are an input of "
    "their own"
)


def is_weighted_pair(inputs: Any) -> bool:
    """Whether `inputs` is one feature: ragged ids and ragged weights."""
    return (
        isinstance(inputs, list | tuple)
        and len(inputs) == 2
        and inputs[0] is not None
        and not _is_float(inputs[0])
        and not is_sparse(inputs[1])
        and _is_float(inputs[1])
    )


def features_of(inputs: Any, binary_values: bool, layer: str) -> list[Ids]:
    """CSR ids of every input whose results are summed.

    Args:
        inputs: see `FullSparse`.
        binary_values: count every value of a SparseTensor as one.
        layer: name, for errors.

    Returns:
        One `Ids` per input.

    Raises:
        ValueError: for an input of another kind.
    """
    if is_weighted_pair(inputs) or not isinstance(inputs, list | tuple):
        inputs = [inputs]
    features = [_feature(value, binary_values, layer) for value in inputs]
    if len({feature.values.dtype for feature in features}) > 1:
        features = [
            dataclasses.replace(f, values=tf.cast(f.values, tf.int64))
            for f in features
        ]
    return features


def ids_of(value: Any, weights: Any, layer: str) -> Ids:
    """CSR ids of a feature whose ids are given as values.

    Args:
        value: int32 or int64 ids, a tensor `[batch]` or `[batch, k]`, a
            RaggedTensor `[batch, None]`, or a SparseTensor whose values are
            the ids.
        weights: None, or floats of the same kind and shape.
        layer: name, for errors.

    Raises:
        ValueError: for an input of another kind.
    """
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.reorder(value)
        _require_ids(value.values, layer, _VALUES)
        ids = Ids(value.values, _splits_of_sparse(value), tf.zeros([0]))
    else:
        ids = _without_weights(value, layer, _VALUES)
    if weights is None:
        return ids
    same_kind = tf.is_tensor(weights) and (
        is_sparse(weights) == is_sparse(value)
        and is_ragged(weights) == is_ragged(value)
    )
    if not same_kind or not _is_float(weights):
        raise ValueError(
            f"Layer '{layer}': weights must be floats of the same kind as "
            f"their ids, {type(value).__name__}. Received: {weights}."
        )
    if isinstance(weights, tf.SparseTensor):
        value, weights = map(tf.sparse.reorder, (value, weights))
        where = value.indices, weights.indices
    elif is_ragged(weights):
        where = value.row_splits, weights.row_splits
    else:
        where = tf.shape(value), tf.shape(weights)
    flat = tf.reshape(getattr(weights, "values", weights), [-1])
    return dataclasses.replace(ids, weights=_aligned(flat, *where, layer))


def _without_weights(value: Any, layer: str, kinds: str) -> Ids:
    if is_ragged(value):
        _require_ids(value.values, layer, kinds)
        return Ids(value.values, _splits(value), tf.zeros([0]))
    return _from_dense(value, layer, kinds)


def is_ragged(value: Any) -> bool:
    """Whether a value is a RaggedTensor of one ragged dimension."""
    return isinstance(value, tf.RaggedTensor) and value.ragged_rank == 1


def _feature(value: Any, binary_values: bool, layer: str) -> Ids:
    if is_weighted_pair(value):
        return _from_weighted(value[0], value[1], layer)
    if isinstance(value, tf.SparseTensor):
        return _from_sparse(value, binary_values)
    return _without_weights(value, layer, _INPUTS)


def is_sparse(value: Any) -> bool:
    """Whether a tensor, or a symbolic one of Keras, is sparse."""
    spec = getattr(value, "type_spec", None)  # symbolic, of tf_keras
    return isinstance(value, tf.SparseTensor) or bool(
        getattr(value, "sparse", isinstance(spec, tf.SparseTensorSpec))
    )


def _is_float(value: Any) -> bool:
    return "float" in str(getattr(value, "dtype", ""))


def _splits(ragged: tf.RaggedTensor) -> tf.Tensor:
    return tf.cast(ragged.row_splits, tf.int64)


def _require_ids(values: tf.Tensor, layer: str, kinds: str) -> None:
    if values.dtype not in (tf.int32, tf.int64) or values.shape.rank != 1:
        raise ValueError(
            f"Layer '{layer}' takes {kinds}. Received values of dtype "
            f"{values.dtype.name} and shape {values.shape}."
        )


def _from_weighted(ids: Any, weights: Any, layer: str) -> Ids:
    if not isinstance(ids, tf.RaggedTensor) or not isinstance(
        weights, tf.RaggedTensor
    ):
        raise ValueError(
            f"Layer '{layer}': ids with weights must both be RaggedTensors. "
            f"Received: {type(ids).__name__}, {type(weights).__name__}."
        )
    _require_ids(ids.values, layer, _INPUTS)
    where = ids.row_splits, weights.row_splits
    return Ids(
        ids.values, _splits(ids), _aligned(weights.values, *where, layer)
    )


def _aligned(
    weights: tf.Tensor, places: tf.Tensor, others: tf.Tensor, layer: str
) -> tf.Tensor:
    """The weights as floats, if they lie where the ids do."""
    same = tf.debugging.assert_equal(
        tf.cast(places, tf.int64),
        tf.cast(others, tf.int64),
        f"Layer '{layer}': weights must lie where their ids do, as many in "
        "every sample.",
    )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.cast(weights, tf.float32)


def _from_sparse(value: tf.SparseTensor, binary_values: bool) -> Ids:
    # Free when the indices are in row-major order, as they should be.
    value = tf.sparse.reorder(value)
    weights = (
        tf.zeros([0]) if binary_values else tf.cast(value.values, tf.float32)
    )
    return Ids(value.indices[:, 1], _splits_of_sparse(value), weights)


def _splits_of_sparse(value: tf.SparseTensor) -> tf.Tensor:
    return tf.searchsorted(
        value.indices[:, 0],
        tf.range(value.dense_shape[0] + 1),
        out_type=tf.int64,
    )


def _from_dense(value: Any, layer: str, kinds: str) -> Ids:
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 1:
        value = value[:, None]
    if value.shape.rank != 2:
        raise ValueError(
            f"Layer '{layer}' takes {kinds}. Received: {value.dtype.name} "
            f"of shape {value.shape}."
        )
    flat = tf.reshape(value, [-1])
    _require_ids(flat, layer, kinds)
    shape = tf.shape(value, tf.int64)
    return Ids(flat, tf.range(shape[0] + 1) * shape[1], tf.zeros([0]))
