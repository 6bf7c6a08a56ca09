# SPDX-License-Identifier: Apache-2.0
"""Single tensors of a checkpoint, and one kind of error for what is torn."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Opened:
    """A checkpoint whose index can be read.

    Args:
        path: of the checkpoint.

    Raises:
        tf.errors.DataLossError: it cannot. TensorFlow's reader itself raises
            what its status comes to in Python: IndexError, for example, where
            a file is too short.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._reader = tf.train.load_checkpoint(path)
            self.names = frozenset(self._reader.get_variable_to_shape_map())
        except Exception as error:
            raise self._torn(error) from error

    def tensor(self, name: str) -> Any:
        """What is there under a name, whole and with a matching checksum.

        Raises:
            tf.errors.DataLossError: if it is not.
        """
        try:
            return self._reader.get_tensor(name)
        except Exception as error:
            raise self._torn(error) from error

    def _torn(self, error: Exception) -> tf.errors.OpError:
        return tf.errors.DataLossError(None, None, f"{self._path}: {error}")
