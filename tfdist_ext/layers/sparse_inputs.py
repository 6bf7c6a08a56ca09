# SPDX-License-Identifier: Apache-2.0
"""Conversion of a sparse layer's inputs to lists of ids in CSR format."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike

Sizes = Sequence[int | None]


def layout_of(
    ids: TensorLike, unpooled: bool, layer: str, length: Sizes = ()
) -> Layout:
    """Returns the layout of a feature's results.

    Args:
        ids: the ids of the feature: a tensor, RaggedTensor or SparseTensor.
        unpooled: whether the result has the row of every id; otherwise rows are
            combined along the last dimension of the ids.
        layer: the layer's name, for errors.
        length: sizes to which ragged dimensions are padded; None for a size
            that is not known. If no size is known, the result is ragged.
    """
    if isinstance(ids, tf.RaggedTensor):
        return _of_ragged(ids, unpooled, layer, length)
    if isinstance(ids, tf.SparseTensor):
        shape, static = ids.dense_shape, ids.shape
    else:
        ids = tf.convert_to_tensor(ids)
        shape, static = tf.shape(ids, tf.int64), ids.shape
        unpooled = unpooled or static.rank == 1
    if static.rank == (1 if unpooled else 2):  # one result for each sample
        return Layout(shape[0], tf.zeros([0], tf.int64), ())
    if not unpooled:
        shape, static = shape[:-1], static[:-1]
    return id_layout.dense(shape, static)


def _of_ragged(
    ids: tf.RaggedTensor, unpooled: bool, layer: str, length: Sizes
) -> Layout:
    splits = [tf.cast(each, tf.int64) for each in ids.nested_row_splits]
    flat = ids.flat_values
    if unpooled or flat.shape.rank > 1:
        within = layout_of(flat, unpooled, layer)
    else:
        count = tf.size(splits.pop(), tf.int64) - 1
        within = Layout(count, tf.zeros([0], tf.int64), ())
    pad: list[int] = []
    if splits and any(size is not None for size in length):
        pad = [-1 if size is None else size for size in length]
    return Layout(
        within.count, within.inner, within.sizes, tuple(splits), tuple(pad)
    )


def of_length(ids: TensorLike, length: Sizes, layer: str) -> TensorLike:
    """Cuts ragged and sparse sequences to a length; checks that of tensors.

    Args:
        ids: ids or their weights, `[batch, ...]`.
        length: sizes of the dimensions after the batch; None allows any size.
        layer: the layer's name, for errors.

    Returns:
        The ids, with a static length if `length` has one.

    Raises:
        ValueError: if a tensor has another length.
    """
    if all(size is None for size in length):
        return ids
    if isinstance(ids, tf.RaggedTensor):
        return ids[(slice(None), *(slice(size) for size in length))]
    if isinstance(ids, tf.SparseTensor):
        return _sparse_of_length(ids, length)
    ids = tf.convert_to_tensor(ids)
    if not ids.shape[1:].is_compatible_with(length):
        raise ValueError(
            f"Layer '{layer}' takes ids (batch, "
            f"{', '.join(map(str, length))}), as its `output_shape` says. "
            f"Received: shape {ids.shape}."
        )
    return tf.ensure_shape(ids, [None, *length])


def _sparse_of_length(ids: tf.SparseTensor, length: Sizes) -> tf.SparseTensor:
    sizes = tf.constant([-1, *(-1 if n is None else n for n in length)])
    sizes = tf.cast(sizes, tf.int64)
    shape = tf.where(sizes < 0, ids.dense_shape, sizes)
    cut = tf.sparse.slice(ids, tf.zeros_like(shape), shape)
    return tf.SparseTensor(
        cut.indices, cut.values, tf.ensure_shape(shape, [len(length) + 1])
    )


_IDS = (
    "int32 or int64 ids [batch], [batch, k] or of more dimensions, a "
    "RaggedTensor of ids [batch, None]"
)
_SMALL_IDS = (
    tf.bool,
    tf.int8,
    tf.int16,
    tf.uint8,
    tf.uint16,
    tf.uint32,
    tf.uint64,
)
# Floats represent all integers below 2 to the power of this number.
_WHOLE = {tf.float16: 11, tf.bfloat16: 8, tf.float32: 24, tf.float64: 53}
# Inputs of FullSparse, and of layers whose ids are values of tensors.
_INPUTS = (
    f"a SparseTensor or a matrix of floats [batch, input_dim], {_IDS}, a pair "
    "(ragged ids, ragged float weights), or a list of these"
)
_VALUES = (
    f"{_IDS}, or a SparseTensor whose values are ids; weights are an input of "
    "their own"
)

_TEXTS = (
    "strings, as its table's key_dtype is 'string', [batch], [batch, k] or of "
    "more dimensions, a RaggedTensor of strings [batch, None], or a "
    "SparseTensor whose values are strings"
)


def is_weighted_pair(inputs: Nest) -> bool:
    """Whether `inputs` is one feature: ragged ids and ragged weights."""
    return (
        isinstance(inputs, list | tuple)
        and len(inputs) == 2
        and inputs[0] is not None
        and not _is_float(inputs[0])
        and not is_sparse(inputs[1])
        and _is_float(inputs[1])
    )


def features_of(
    inputs: Nest, rows: int | None, binary_values: bool, layer: str
) -> list[Ids]:
    """Returns the ids of every input, in CSR format; their results are summed.

    Args:
        inputs: one input or a list of inputs, see `FullSparse`.
        rows: number of rows of the kernel; a dense input with as many columns
            is a matrix.
        binary_values: whether every value of a matrix counts as 1.
        layer: the layer's name, for errors.

    Returns:
        One `Ids` per input, all with the same dtype of ids.

    Raises:
        ValueError: if the type of an input is not supported.
    """
    if is_weighted_pair(inputs) or not isinstance(inputs, list | tuple):
        inputs = [inputs]
    features = [_feature(each, rows, binary_values, layer) for each in inputs]
    if len({feature.values.dtype for feature in features}) > 1:
        features = [
            dataclasses.replace(f, values=tf.cast(f.values, tf.int64))
            for f in features
        ]
    return features


def refuse_matrix(inputs: Nest, rows: int | None, layer: str) -> None:
    """Refuses dense matrices of weights: their floats could be taken for ids.

    Args:
        inputs: one input of a layer, or a nest of inputs.
        rows: number of rows of the layer's table.
        layer: the layer's name, for errors.

    Raises:
        ValueError: if an input has floats and a column for every row.
    """
    for value in tf.nest.flatten(inputs):
        if _is_as_wide(value, rows) and _is_float(value):
            raise ValueError(
                f"Layer '{layer}' takes {_VALUES}. Received a dense matrix of "
                f"floats of shape {value.shape}, as wide as the table has rows."
            )


def _is_as_wide(value: object, rows: int | None) -> bool:
    """Whether a dense tensor has a column for every row of a table."""
    if isinstance(value, tf.RaggedTensor) or is_sparse(value):
        return False
    shape: Sequence[int | None] = getattr(value, "shape", ())
    return len(shape) > 1 and shape[-1] == rows


def width_of(inputs: Nest, layer: str) -> int:
    """Returns `input_dim` of SparseTensor inputs, from their static shape."""
    values = inputs if isinstance(inputs, list | tuple) else [inputs]
    widths = {value.shape[-1] if is_sparse(value) else None for value in values}
    width = widths.pop()
    if widths or width is None:
        raise ValueError(
            f"Layer '{layer}' cannot infer `input_dim`, the number of rows of "
            "its kernel, from its inputs: this needs SparseTensors of equal, "
            "statically known width. Pass FullSparse(units, input_dim=...)."
        )
    return int(width)


def sizes_of(shape: Shape) -> list[int | None]:
    """Returns the dimensions of a shape, or of the first shape in a nest.

    The list is empty if the number of dimensions is not known.
    """
    kinds = dict | list | tuple | tf.TensorShape
    while isinstance(shape, kinds):
        if isinstance(shape, dict):
            shape = list(shape.values())
        if isinstance(shape, tf.TensorShape) and shape.rank is None:
            return []
        if not len(shape) or not isinstance(shape[0], kinds):
            return [None if size is None else int(size) for size in shape]
        shape = shape[0]
    return []


def ids_of(
    value: TensorLike,
    weights: TensorLike,
    layer: str,
    unpooled: bool = False,
    texts: bool = False,
) -> Ids:
    """Returns the ids of a feature whose ids are values, in CSR format.

    If `unpooled` is set, every list has one id, or at most one for each cell of
    a SparseTensor. Otherwise a list has the ids along the last dimension.
    `id_layout.arranged` restores the dimensions of the results.

    Args:
        value: int32 or int64 ids: a tensor `[batch]` or `[batch, k]`, a
            RaggedTensor `[batch, None]`, either of them with more dimensions
            in between, or a SparseTensor whose values are the ids.
        weights: None, or floats or integers of the same type and shape.
            Weights of shape `[batch]` or `[batch, 1]` apply to all ids of a
            sample.
        layer: the layer's name, for errors.
        unpooled: whether the result has the row of every id.
        texts: whether ids are strings, as keys of a dynamic vocabulary may be.

    Raises:
        ValueError: if the type of an input is not supported.
    """
    kinds = _TEXTS if texts else _VALUES
    if isinstance(value, tf.SparseTensor):
        value = tf.sparse.reorder(value)
        found = _require_ids(value.values, layer, kinds)
        splits = (
            _splits_of_cells(value) if unpooled else _splits_of_sparse(value)
        )
        ids = Ids(found, splits, tf.zeros([0]))
    else:
        ids = _without_weights(value, layer, kinds, unpooled)
    if weights is None:
        return ids
    composites = tf.SparseTensor | tf.RaggedTensor
    if isinstance(value, composites) or isinstance(weights, composites):
        same_kind = type(weights) is type(value)
    else:
        value, weights = map(tf.convert_to_tensor, (value, weights))
        same_kind = weights.shape.rank in (1, 2, value.shape.rank)
    if not (same_kind and (_is_float(weights) or weights.dtype.is_integer)):
        raise ValueError(
            f"Layer '{layer}': weights must be floats or integers in a "
            f"{type(value).__name__}, as their ids are. Received: {weights}."
        )
    flat, places, others = _placed(value, weights)
    return dataclasses.replace(
        ids, weights=_aligned(flat, places, others, layer)
    )


def _placed(
    value: TensorLike, weights: TensorLike
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the weights `[n]`, the places of ids, and those of weights."""
    if isinstance(weights, tf.SparseTensor):
        value, weights = map(tf.sparse.reorder, (value, weights))
        return weights.values, value.indices, weights.indices
    if isinstance(weights, tf.RaggedTensor):
        splits = [
            tf.concat([tf.cast(s, tf.int64) for s in r.nested_row_splits], 0)
            for r in (value, weights)
        ]
        return tf.reshape(weights.flat_values, [-1]), splits[0], splits[1]
    if value.shape.rank == 1:
        value = value[:, None]
    if weights.shape.rank == 1:  # one weight for all ids of a sample
        weights = tf.repeat(weights[:, None], tf.shape(value)[1], axis=1)
    return tf.reshape(weights, [-1]), tf.shape(value), tf.shape(weights)


def _without_weights(
    value: TensorLike, layer: str, kinds: str, unpooled: bool = False
) -> Ids:
    if not isinstance(value, tf.RaggedTensor):
        return _from_dense(value, layer, kinds, unpooled)
    flat = value.flat_values
    if unpooled or flat.shape.rank > 1:
        return _from_dense(flat, layer, kinds, unpooled)
    splits = tf.cast(value.nested_row_splits[-1], tf.int64)
    return Ids(_require_ids(flat, layer, kinds), splits, tf.zeros([0]))


def _one_each(values: tf.Tensor) -> tf.Tensor:
    """Returns row splits of lists of one id each."""
    splits = _from_zero_to(tf.size(values, tf.int64))
    marks.set_list_length(splits, 1)
    return splits


def _feature(
    value: TensorLike, rows: int | None, binary_values: bool, layer: str
) -> Ids:
    if is_weighted_pair(value):
        return _from_weighted(value[0], value[1], layer)
    if _is_as_wide(value, rows):
        value = _matrix(value, layer)
    if isinstance(value, tf.SparseTensor):
        return _from_sparse(value, binary_values)
    return _without_weights(value, layer, _INPUTS)


def _matrix(value: TensorLike, layer: str) -> tf.SparseTensor:
    """Returns the non-zero elements of a matrix, as a SparseTensor."""
    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating and value.shape[-1] > 1:
        raise ValueError(
            f"Layer '{layer}' cannot tell ids from a matrix of counts: it got "
            f"{value.dtype.name} values of shape {value.shape}, as wide as "
            "the kernel has rows. Cast a matrix, such as one of `multi_hot`, "
            "to float32; pass ids as `tf.RaggedTensor.from_tensor(ids)`."
        )
    return tf.sparse.from_dense(value)


def is_sparse(value: object) -> bool:
    """Whether a tensor, or a symbolic tensor of Keras, is sparse."""
    spec = getattr(value, "type_spec", None)  # symbolic tensors of tf_keras
    return isinstance(value, tf.SparseTensor) or bool(
        getattr(value, "sparse", isinstance(spec, tf.SparseTensorSpec))
    )


def _is_float(value: object) -> bool:
    return "float" in str(getattr(value, "dtype", ""))


def _require_ids(values: tf.Tensor, layer: str, kinds: str) -> tf.Tensor:
    """Returns the ids as int32 or int64, or as strings; refuses others."""
    good = (tf.string,) if kinds is _TEXTS else (tf.int32, tf.int64)
    if values.dtype in _SMALL_IDS:
        values = tf.cast(values, tf.int64)
    if values.dtype not in good or values.shape.rank != 1:
        raise ValueError(
            f"Layer '{layer}' takes {kinds}. Received values of dtype "
            f"{values.dtype.name} and shape {values.shape}."
        )
    return values


def _from_weighted(ids: TensorLike, weights: TensorLike, layer: str) -> Ids:
    if not isinstance(ids, tf.RaggedTensor) or not isinstance(
        weights, tf.RaggedTensor
    ):
        raise ValueError(
            f"Layer '{layer}': ids with weights must both be RaggedTensors. "
            f"Received: {type(ids).__name__}, {type(weights).__name__}."
        )
    found = _without_weights(ids, layer, _INPUTS)
    aligned = _aligned(*_placed(ids, weights), layer)
    return dataclasses.replace(found, weights=aligned)


def _aligned(
    weights: tf.Tensor, places: tf.Tensor, others: tf.Tensor, layer: str
) -> tf.Tensor:
    """Returns the weights as floats, and checks that they match the ids."""
    same = tf.debugging.assert_equal(
        tf.cast(places, tf.int64),
        tf.cast(others, tf.int64),
        f"Layer '{layer}': ids and weights must have the same positions, with "
        "one weight for each id of a sample.",
    )
    with tf.control_dependencies([] if same is None else [same]):
        return tf.cast(weights, tf.float32)


def _from_sparse(value: tf.SparseTensor, binary_values: bool) -> Ids:
    # Costs nothing if the indices are in row-major order, as is usual.
    value = tf.sparse.reorder(value)
    if value.shape.rank != 2:  # concatenate the lists of all samples
        value = tf.sparse.reshape(value, [-1, value.dense_shape[-1]])
    weights = (
        tf.zeros([0]) if binary_values else tf.cast(value.values, tf.float32)
    )
    return Ids(value.indices[:, 1], _splits_of_sparse(value), weights)


def _splits_of_sparse(value: tf.SparseTensor) -> tf.Tensor:
    return tf.searchsorted(
        value.indices[:, 0],
        _from_zero_to(value.dense_shape[0]),
        out_type=tf.int64,
    )


def _splits_of_cells(value: tf.SparseTensor) -> tf.Tensor:
    """Returns row splits of lists that are cells with at most one id each."""
    shape = value.dense_shape
    within = tf.math.cumprod(shape, exclusive=True, reverse=True)
    cells = tf.reduce_sum(value.indices * within, axis=1)
    return tf.searchsorted(
        cells, _from_zero_to(tf.reduce_prod(shape)), out_type=tf.int64
    )


def _whole_numbers(value: tf.Tensor, layer: str) -> tf.Tensor:
    """Returns ids as int64 that Keras has cast to floats.

    `keras.Input` does so by default.
    """
    # Larger floats do not represent every integer: ids may have changed.
    exact = 2 ** _WHOLE[value.dtype]
    good = tf.equal(value, tf.floor(value)) & (tf.abs(value) < exact)
    message = (
        f"Layer '{layer}' got ids as {value.dtype.name}, and some are not "
        f"whole numbers below {exact}. Give ids as integers, and "
        "keras.Input(..., dtype='int64') for them. Received among them:"
    )
    bad = tf.boolean_mask(value, ~good)[:3]
    checked = tf.debugging.Assert(tf.reduce_all(good), [message, bad])
    with tf.control_dependencies([] if checked is None else [checked]):
        return tf.cast(value, tf.int64)


def _from_dense(
    value: TensorLike, layer: str, kinds: str, unpooled: bool
) -> Ids:
    value = tf.convert_to_tensor(value)
    if value.dtype in _WHOLE:
        value = _whole_numbers(value, layer)
    if unpooled:
        flat = _require_ids(tf.reshape(value, [-1]), layer, kinds)
        return Ids(flat, _one_each(flat), tf.zeros([0]))
    if value.shape.rank == 1:
        value = value[:, None]
    if not value.shape.rank:
        raise ValueError(
            f"Layer '{layer}' takes {kinds}. Received: {value.dtype.name} "
            f"of shape {value.shape}."
        )
    flat = _require_ids(tf.reshape(value, [-1]), layer, kinds)
    if value.shape[-1]:  # statically known, and not 0
        splits = _from_zero_to(tf.size(flat, tf.int64), value.shape[-1])
        marks.set_list_length(splits, value.shape[-1])
        return Ids(flat, splits, tf.zeros([0]))
    shape = tf.shape(value, tf.int64)
    lists = _from_zero_to(tf.reduce_prod(shape[:-1]))
    return Ids(flat, lists * shape[-1], tf.zeros([0]))


def _from_zero_to(last: tf.Tensor, step: int = 1) -> tf.Tensor:
    """Returns 0, `step`, ... `last`: int64 `[last / step + 1]`."""
    # Without the dtype, TensorFlow would cast start and step in the graph.
    return tf.range(0, last + 1, step, dtype=tf.int64)
