# SPDX-License-Identifier: Apache-2.0
"""Initial values of a cell of a table."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import library


def init_rows(
    *,
    rows: int,
    row_part: int,
    row_parts: int,
    local_rows: int,
    first_column: int,
    local_dim: int,
    seed: int | tf.Tensor,
    distribution: str,
    a: float = 0.0,
    b: float = 0.0,
) -> tf.Tensor:
    """One cell of a table's initial values.

    Args:
        rows: rows of the whole table.
        row_part: which part of the rows.
        row_parts: number of parts of the rows.
        local_rows: rows to make, all of the part or none.
        first_column: of the cell.
        local_dim: columns of the cell.
        seed: int64; with the row's id and the column it determines a value.
        distribution: "zeros", "constant" (a), "uniform" (from a up to b),
            "normal" (mean a, standard deviation b) or "truncated_normal"
            (the same, within two standard deviations).
        a: first parameter.
        b: second parameter.

    Returns:
        float32 `[local_rows, local_dim]`; padding rows are zero.
    """
    if distribution == "zeros":
        distribution, a = "constant", 0.0
    return library().tfdist_init_rows(
        tf.convert_to_tensor(seed, tf.int64),
        rows=rows,
        row_part=row_part,
        row_parts=row_parts,
        local_rows=local_rows,
        first_column=first_column,
        local_dim=local_dim,
        distribution=distribution,
        a=a,
        b=b,
    )


def reset_rows(
    variable: tf.Variable, ids: tf.Tensor, *, distribution: str, **block: Any
) -> Any:
    """Gives rows of a table, or of a slot, their initial values again.

    Args:
        variable: float32 or bfloat16 `[local_rows, local_dim]`, or a slot
            `[local_rows]`; written in place.
        ids: int64 `[n]`, of the whole table; those of other cells are left
            alone.
        distribution: see `init_rows`.
        **block: the other arguments of `init_rows`.

    Returns:
        The operation in a graph, None when executing eagerly.
    """
    if distribution == "zeros":
        distribution, block["a"] = "constant", 0.0
    seed = tf.convert_to_tensor(block.pop("seed"), tf.int64)
    return library().tfdist_reset_rows(
        variable.handle, ids, seed, distribution=distribution, **block
    )
