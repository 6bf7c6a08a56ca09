# SPDX-License-Identifier: Apache-2.0
"""A model that counts how often each record of a stream is trained."""

import struct

import tensorflow as tf

import tfdist_ext

keras = tf.keras


class Negative(keras.losses.Loss):
    """The sum of the predictions, negated: each sample's gradient is -1."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return -y_pred[:, 0]


def make_counter(strategy, records):
    """A table with a row for each record, which SGD raises by 1."""
    keras.backend.clear_session()
    with strategy.scope():
        table = tfdist_ext.layers.FullSparse(
            1, records, use_bias=False, kernel_initializer="zeros"
        )
        model = keras.Sequential([keras.Input([1], dtype="int64"), table])
        model.compile(tfdist_ext.optimizers.SGD(1.0), Negative())
    return model


def counts(strategy, model):
    """How often each record was trained."""
    return strategy.gather_table(model.layers[-1])[:, 0]


def parse(numbers):
    """A batch of the numbers of records, as strings."""
    ids = tf.strings.to_number(numbers, tf.int64)[:, None]
    return ids, tf.zeros(tf.shape(ids))


def tf_record(text):
    """Bytes of a record in a TFRecord file."""
    data = text.encode()
    size = struct.pack("<Q", len(data))
    return size + _checksum(size) + data + _checksum(data)


def _checksum(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return struct.pack("<I", masked)


def write_files(folder, file_format, records):
    """Writes some records; returns the bytes of the rest of each file."""
    encode = tf_record if file_format == "tfrecord" else "{}\n".format
    size = -(-records // 3)
    rest = {}
    for number, first in enumerate(range(0, records, size)):
        ids = range(first, min(first + size, records))
        text = [encode(str(each)) for each in ids]
        data = b"".join(t if isinstance(t, bytes) else t.encode() for t in text)
        path = folder / f"{number}.{file_format}"
        half = len(data) // 2  # in a record, mostly
        path.write_bytes(data[:half])
        rest[path] = data[half:]
    return rest
