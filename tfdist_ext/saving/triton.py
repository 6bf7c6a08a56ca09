# SPDX-License-Identifier: Apache-2.0
"""Configurations of models for NVIDIA's Triton Inference Server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

# Names of dtypes in a configuration. Source:
# https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md#datatypes
_TYPES = {
    tf.bool: "TYPE_BOOL",
    tf.uint8: "TYPE_UINT8",
    tf.uint16: "TYPE_UINT16",
    tf.uint32: "TYPE_UINT32",
    tf.uint64: "TYPE_UINT64",
    tf.int8: "TYPE_INT8",
    tf.int16: "TYPE_INT16",
    tf.int32: "TYPE_INT32",
    tf.int64: "TYPE_INT64",
    tf.float16: "TYPE_FP16",
    tf.float32: "TYPE_FP32",
    tf.float64: "TYPE_FP64",
    tf.bfloat16: "TYPE_BF16",
    tf.string: "TYPE_STRING",
}


def config_of(
    name: str,
    max_batch_size: int,
    inputs: Mapping[str, tf.TensorSpec],
    outputs: Mapping[str, tf.TensorSpec],
) -> str:
    """The text of `config.pbtxt` for a model in ONNX.

    Args:
        name: the model's name, which is that of its folder.
        max_batch_size: the largest batch that the server makes of requests; 0
            if the shapes of requests include the batch.
        inputs: specs of the inputs, by name.
        outputs: specs of the outputs, by name.

    Raises:
        ValueError: a tensor has a shape or a dtype that Triton does not allow.
    """
    lines = [
        f"name: {json.dumps(name)}",
        'backend: "onnxruntime"',
        f"max_batch_size: {max_batch_size}",
        *_tensors("input", inputs, max_batch_size),
        *_tensors("output", outputs, max_batch_size),
    ]
    return "\n".join(lines) + "\n"


def _tensors(
    field: str, specs: Mapping[str, tf.TensorSpec], max_batch_size: int
) -> list[str]:
    lines = []
    for name, spec in specs.items():
        lines += [
            f"{field} {{",
            f"  name: {json.dumps(name)}",
            f"  data_type: {_TYPES[spec.dtype]}",
            *_shape(field, name, spec, max_batch_size),
            "}",
        ]
    return lines


def _shape(
    field: str, name: str, spec: tf.TensorSpec, max_batch_size: int
) -> list[str]:
    """The lines of a tensor's shape, without that of the batch."""
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None:
        raise ValueError(
            "Triton needs the number of dimensions of each tensor, and that "
            f"of {field} '{name}' is not known. Set it in the model, as by "
            "keras.layers.Reshape."
        )
    sizes = [-1 if size is None else size for size in shape.as_list()]
    if max_batch_size == 0:
        return [f"  dims: {_list(sizes)}"]
    if sizes[:1] != [-1]:
        raise ValueError(
            "Triton makes batches of requests along the first dimension of "
            f"each tensor, and that of {field} '{name}' is not the batch: its "
            f"shape is {shape}. Pass triton_max_batch_size=0, so that requests "
            "are whole batches."
        )
    if len(sizes) > 1:
        return [f"  dims: {_list(sizes[1:])}"]
    # Triton allows no empty shape here.
    return ["  dims: [ 1 ]", "  reshape: { shape: [ ] }"]


def _list(sizes: Sequence[int]) -> str:
    return f"[ {', '.join(map(str, sizes))} ]"
