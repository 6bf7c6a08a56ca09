# SPDX-License-Identifier: Apache-2.0
"""A layer that tells which samples a model was given."""

import tensorflow as tf

keras = tf.keras


class Recorder(keras.layers.Layer):
    """Notes the samples of every step."""

    def __init__(self, seen):
        super().__init__()
        self.append = seen.append  # Keras copies lists

    def call(self, values):
        def note(batch):
            self.append(batch[:, 0].astype(int).tolist())
            return batch

        noted = tf.numpy_function(note, [values], values.dtype)
        return tf.ensure_shape(noted, values.shape)
