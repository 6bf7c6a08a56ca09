# SPDX-License-Identifier: Apache-2.0
"""Warm-up requests of a SavedModel, which TensorFlow Serving runs at its start.

Source: https://www.tensorflow.org/tfx/serving/saved_model_warmup. The messages
are those of `tensorflow_serving/apis/prediction_log.proto`, written without its
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence

import tensorflow as tf

FILE = "assets.extra/tf_serving_warmup_requests"
# A server refuses to load a model with more of them.
MOST = 1000

# Numbers of fields.
_LOG_OF_PREDICT = 6
_REQUEST = 1
_MODEL_SPEC, _INPUTS = 1, 2
_SIGNATURE_NAME = 3
_KEY, _VALUE = 1, 2


def write(folder: str, requests: Sequence[Mapping[str, tf.Tensor]]) -> None:
    """Writes requests of the signature `serving_default`.

    Args:
        folder: folder of the SavedModel.
        requests: tensors of each request, by the names of the signature.
    """
    path = f"{folder}/{FILE}"
    tf.io.gfile.makedirs(path.rpartition("/")[0])
    with tf.io.TFRecordWriter(path) as file:
        for each in requests:
            file.write(_prediction_log(each))


def _prediction_log(tensors: Mapping[str, tf.Tensor]) -> bytes:
    spec = _field(_SIGNATURE_NAME, b"serving_default")
    request = _field(_MODEL_SPEC, spec)
    for name, tensor in tensors.items():
        proto = tf.make_tensor_proto(tensor).SerializeToString()
        entry = _field(_KEY, name.encode()) + _field(_VALUE, proto)
        request += _field(_INPUTS, entry)
    return _field(_LOG_OF_PREDICT, _field(_REQUEST, request))


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes, a string or a message in the format of protobuf."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])
