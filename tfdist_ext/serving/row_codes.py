# SPDX-License-Identifier: Apache-2.0
"""How rows of numbers are served: as float32, bfloat16 or int8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

TABLE_DTYPES = ("float32", "bfloat16", "int8")


def kinds(
    dtype: str, rows: Any, dim: int
) -> dict[str, tuple[tf.DType, list[Any]]]:
    """What a table consists of, by name: dtype and shape.

    Args:
        dtype: one of `TABLE_DTYPES`.
        rows: of the table, None if not known.
        dim: its columns.
    """
    found = {"values": (tf.as_dtype(dtype), [rows, dim])}
    if dtype == "int8":
        # What the numbers of a row are multiplied by.
        found["scales"] = (tf.float32, [rows])
    return found


def encoded(block: np.ndarray, dtype: str) -> dict[str, np.ndarray]:
    """Numbers of rows `[n, dim]` as they are served, by name."""
    if dtype != "int8":
        return {"values": block.astype(tf.as_dtype(dtype).as_numpy_dtype)}
    block = block.astype(np.float32)
    scales = np.abs(block).max(1) / np.float32(127)
    divisors = np.where(scales > 0, scales, 1)[:, np.newaxis]
    values = np.rint(block / divisors).astype(np.int8)
    return {"values": values, "scales": scales}


def decoded(parts: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """Rows float32 `[n, dim]` of what is served of them."""
    rows = tf.cast(parts["values"], tf.float32)
    if "scales" in parts:
        rows *= parts["scales"][:, tf.newaxis]
    return rows
