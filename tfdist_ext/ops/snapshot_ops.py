# SPDX-License-Identifier: Apache-2.0
"""Snapshots of variables: their rows at one point in time.

A checkpoint is written from a snapshot while training goes on. The updates of
`optimizer_ops` copy a row before they change it, so a snapshot needs memory for
the rows that change before they are read. Other ops that write to the variable
copy all of it first.
"""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.ops.library import library


class RowSnapshot:
    """The rows of a variable as they are when this object is made.

    It ends with the last reference to this object.

    Args:
        variable: a `tf.Variable` of TensorFlow in host memory, with at least
            one dimension.
    """

    def __init__(self, variable: tf.Variable) -> None:
        self._dtype = variable.dtype
        with tf.device("CPU:0"):
            self._handle = library().tfdist_start_row_snapshot(variable.handle)

    def take(self, rows: tf.Tensor) -> tf.Tensor:
        """Copies rows. Each row can be taken once.

        Args:
            rows: int64 `[n]`.

        Returns:
            `[n, ...]`, the rows as they were when the snapshot was made.

        Raises:
            tf.errors.InvalidArgumentError: a row is outside of the variable.
            tf.errors.FailedPreconditionError: a row was taken before.
        """
        with tf.device("CPU:0"):
            return library().tfdist_take_snapshot_rows(
                self._handle, rows, dtype=self._dtype
            )
