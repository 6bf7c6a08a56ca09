# SPDX-License-Identifier: Apache-2.0
"""Tables of a model that is converted to ONNX."""

from __future__ import annotations

import re

import tensorflow as tf

from tfdist_ext.saving.served_table import MappedTable
from tfdist_ext.saving.served_table import decoded_rows

_NAME = re.compile(r"TfdistTable_([0-9a-f]+)_(values|scales)(_\d+)?:0$")


class OnnxTable(MappedTable):
    """A table `[rows, dim]` in files, whose arrays are inputs of the graph.

    The graph can be converted, but not run: its tables are placeholders, so
    that a converter does not read them. Their default values have no rows.
    """

    def rows_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Rows float32 `[..., dim]` of ids int64 `[...]`.

        ONNX counts ids from -rows to -1 from the end of the table, where
        TensorFlow reports an error. They become ids that are errors in both.
        """
        ids -= tf.cast(ids < 0, tf.int64) * self.rows
        code = self.table_name.encode().hex()
        parts = {
            part: tf.gather(
                tf.raw_ops.PlaceholderWithDefault(
                    input=tf.zeros([0, *shape[1:]], dtype),
                    shape=[None, *shape[1:]],
                    name=f"TfdistTable_{code}_{part}",
                ),
                ids,
            )
            for part, (dtype, shape) in self.kinds().items()
        }
        return decoded_rows(parts)


def array_of(tensor: str) -> tuple[str, str] | None:
    """The table and the array that a placeholder stands for.

    Args:
        tensor: name of a tensor of the graph.

    Returns:
        The table's name and "values" or "scales"; None for other tensors.
    """
    found = _NAME.search(tensor)
    if found is None:
        return None
    return bytes.fromhex(found[1]).decode(), found[2]
