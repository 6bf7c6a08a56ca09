# SPDX-License-Identifier: Apache-2.0
"""A table as it is served: variables of stock TensorFlow, and their rows.

A kind of table whose keys are no row numbers would be another class with
`rows_of`, `encoded` and `variables`, for instance one that asks a hash table
of TensorFlow for the row first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.serving import row_codes
from tfdist_ext.tables.shard_spec import ShardSpec


class ServedTable(tf.Module):
    """A table `[rows, dim]`, empty until its file is written.

    Attributes:
        values: variable `[None, dim]` of float32, bfloat16 or int8.
        scales: of int8, float32 `[None]`, what the numbers of a row are
            multiplied by; None otherwise.
        rows: of the whole table.
        source: the variable of the training that it is made of.
    """

    def __init__(
        self, name: str, spec: ShardSpec, dtype: str, source: Any
    ) -> None:
        super().__init__()
        self.table_name, self.rows, self.dim = name, spec.rows, spec.dim
        # In a function, so that TensorFlow does not save it as well.
        self.source = lambda: source
        self._dtype = dtype
        made = {
            name: tf.Variable(
                tf.zeros([0, *shape[1:]], kind),
                trainable=False,
                shape=shape,
                name=name,
            )
            for name, (kind, shape) in row_codes.kinds(
                dtype, None, spec.dim
            ).items()
        }
        self.values, self.scales = made["values"], made.get("scales")

    def parts(self) -> dict[str, tf.Variable]:
        """The variables that hold rows, by name."""
        parts = {"values": self.values}
        if self.scales is not None:
            parts["scales"] = self.scales
        return parts

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[n, dim]` of ids int64 `[n]`, all in the table."""
        # By rows: a read of all would make every update copy the table.
        found = {
            name: tf.gather(variable, ids)
            for name, variable in self.parts().items()
        }
        return row_codes.decoded(found)

    def encoded(self, block: np.ndarray) -> dict[str, np.ndarray]:
        """Numbers of rows `[n, dim]` as the variables hold them, by name."""
        return row_codes.encoded(block, self._dtype)
