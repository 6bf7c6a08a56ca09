# SPDX-License-Identifier: Apache-2.0
"""What a served model takes and gives, as a nest and as named tensors.

A signature of a SavedModel has tensors only, by name. A RaggedTensor "x" is
`x` (its values) and `x_row_splits`, `x_row_splits_1` of inner dimensions; a
SparseTensor `x_indices`, `x_values` and `x_shape`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.keras_internals import KERAS_3

keras = tf.keras

Nest = Any


def inputs_of(model: Any, given: Nest = None) -> Nest:
    """Specs of what a model takes, of any batch size.

    Args:
        model: of Keras.
        given: a nest of specs, or of the values of a batch; None for what
            the model knows of its inputs.

    Raises:
        ValueError: where the model does not know it.
    """
    if given is None:
        given = _known_inputs(model)
    if given is None:
        raise ValueError(
            f"Model '{model.name}' does not say what it takes. Pass "
            "`inputs`: a batch as you give it to predict(), or a nest of "
            "tf.TensorSpec, tf.RaggedTensorSpec and tf.SparseTensorSpec."
        )
    return tf.nest.map_structure(_spec_of, _plain(given))


def _known_inputs(model: Any) -> Nest:
    if KERAS_3:
        if isinstance(model, keras.Sequential):
            return model.inputs[0] if getattr(model, "inputs", None) else None
        # Of a subclass, Keras knows shapes but no dtypes.
        return model.input if hasattr(model, "output_names") else None
    spec = model.save_spec()
    if spec is None:
        return None
    (inputs, *_), _ = spec
    return inputs


def _plain(nest: Nest) -> Nest:
    """The nest without the wrappers that Keras tracks it by."""
    if isinstance(nest, Mapping):
        return {key: _plain(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple) and not _is_leaf(nest):
        return [_plain(value) for value in nest]
    return nest


def _is_leaf(value: Any) -> bool:
    return isinstance(value, tf.SparseTensor)


def _spec_of(value: Any) -> tf.TypeSpec:
    """The spec of one input, whatever says it; of any batch size."""
    name = getattr(value, "name", None) or None
    if isinstance(value, tf.TypeSpec):
        spec = value
    elif hasattr(value, "type_spec"):  # symbolic, of tf_keras
        spec = value.type_spec
    elif isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        spec, name = tf.type_spec_from_value(value), None
    elif tf.is_tensor(value) or isinstance(value, np.ndarray):
        spec = tf.TensorSpec(value.shape, value.dtype)
        name = None
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        spec = _spec_of_keras_3(value)
    else:
        spec = tf.type_spec_from_value(tf.convert_to_tensor(value))
    return _of_any_batch(spec, name)


def _spec_of_keras_3(value: Any) -> tf.TypeSpec:
    shape = list(value.shape)
    if getattr(value, "sparse", False):
        return tf.SparseTensorSpec(shape, value.dtype)
    if getattr(value, "ragged", False):
        rank = getattr(value, "ragged_rank", None) or len(shape) - 1
        return tf.RaggedTensorSpec(shape, value.dtype, rank)
    return tf.TensorSpec(shape, value.dtype)


def _of_any_batch(spec: tf.TypeSpec, name: str | None) -> tf.TypeSpec:
    shape = tf.TensorShape(spec.shape)
    if shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, name)


def names_of_inputs(nest: Nest) -> list[str]:
    """A name for every spec: its key, the name that it has, or a number."""
    paths = _paths(nest)
    own = [getattr(spec, "name", None) for spec in tf.nest.flatten(nest)]
    default = "inputs" if len(paths) == 1 else "inputs_{}"
    return _names(
        [
            path
            if any(c.isalpha() for c in path)
            else name or default.format(i)
            for i, (path, name) in enumerate(zip(paths, own, strict=True))
        ]
    )


def names_of_outputs(nest: Nest) -> list[str]:
    """A name for every output: its key, or "output_0" and so on."""
    return _names(
        [
            path if any(c.isalpha() for c in path) else f"output_{i}"
            for i, path in enumerate(_paths(nest))
        ]
    )


def _names(wanted: Sequence[str]) -> list[str]:
    """What a signature may call them, each by another name."""
    names = [re.sub(r"\W", "_", name) for name in wanted]
    if len(set(names)) < len(names):
        names = [f"{name}_{i}" for i, name in enumerate(names)]
    return names


def _is_nested(nest: Nest) -> bool:
    return isinstance(nest, list | tuple) and not _is_leaf(nest)


def _paths(nest: Nest) -> list[str]:
    """Places of the leaves, in the order of `tf.nest.flatten`."""
    if isinstance(nest, Mapping):
        items = [(str(key), nest[key]) for key in sorted(nest)]
    elif _is_nested(nest):
        items = [(str(index), value) for index, value in enumerate(nest)]
    else:
        return [""]
    return [
        f"{key}_{path}".rstrip("_")
        for key, value in items
        for path in _paths(value)
    ]


def flat_specs(
    names: Sequence[str], specs: Sequence[tf.TypeSpec]
) -> dict[str, tf.TensorSpec]:
    """The tensors that leaves are made of, by name."""
    flat: dict[str, tf.TensorSpec] = {}
    for name, spec in zip(names, specs, strict=True):
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = spec.shape[spec.ragged_rank + 1 :]
            flat[name] = tf.TensorSpec([None, *inner], spec.dtype)
            for level in range(spec.ragged_rank):
                splits = tf.TensorSpec([None], spec.row_splits_dtype)
                flat[_splits_name(name, level)] = splits
        elif isinstance(spec, tf.SparseTensorSpec):
            rank = tf.TensorShape(spec.shape).rank
            parts = (
                tf.TensorSpec([None, rank], tf.int64),
                tf.TensorSpec([None], spec.dtype),
                tf.TensorSpec([rank], tf.int64),
            )
            flat.update(zip(_names_of_sparse(name), parts, strict=True))
        else:
            flat[name] = spec
    return {
        name: tf.TensorSpec(spec.shape, spec.dtype, name)
        for name, spec in flat.items()
    }


def _splits_name(name: str, level: int) -> str:
    return "_".join([name, "row", "splits", *([str(level)] if level else [])])


def _names_of_sparse(name: str) -> list[str]:
    return ["_".join([name, part]) for part in ("indices", "values", "shape")]


def packed(
    names: Sequence[str],
    specs: Sequence[tf.TypeSpec],
    flat: Mapping[str, tf.Tensor],
) -> list[Any]:
    """The leaves, from the tensors that `flat_specs` names."""
    leaves = []
    for name, spec in zip(names, specs, strict=True):
        if isinstance(spec, tf.RaggedTensorSpec):
            splits = [
                flat[_splits_name(name, level)]
                for level in range(spec.ragged_rank)
            ]
            leaves.append(
                tf.RaggedTensor.from_nested_row_splits(flat[name], splits)
            )
        elif isinstance(spec, tf.SparseTensorSpec):
            parts = (flat[part] for part in _names_of_sparse(name))
            leaves.append(tf.SparseTensor(*parts))
        else:
            leaves.append(flat[name])
    return leaves


def flattened(names: Sequence[str], leaves: Sequence[Any]) -> dict[str, Any]:
    """The tensors of some leaves, by name: the inverse of `packed`."""
    flat: dict[str, Any] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, tf.RaggedTensor):
            flat[name] = leaf.flat_values
            for level, splits in enumerate(leaf.nested_row_splits):
                flat[_splits_name(name, level)] = splits
        elif isinstance(leaf, tf.SparseTensor):
            parts = (leaf.indices, leaf.values, leaf.dense_shape)
            flat.update(zip(_names_of_sparse(name), parts, strict=True))
        else:
            flat[name] = leaf
    return flat
