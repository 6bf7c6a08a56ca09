# SPDX-License-Identifier: Apache-2.0
"""What is looked up: ids, the table behind them, and how results travel."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import Combiner
from tfdist_ext.tables.checks import OutOfRange
from tfdist_ext.tables.checks import refuse_removed
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.tables.placement import ShardSpec


@dataclasses.dataclass(frozen=True)
class Ids:
    """Ids of a batch, one list per sample (CSR).

    Attributes:
        values: int32 or int64 `[n]`.
        row_splits: int64 `[b + 1]`; sample s has the ids
            `values[row_splits[s] : row_splits[s + 1]]`.
        weights: float32 `[n]`, or `[0]` when all weights are one.
    """

    values: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor


_SCATTER = 0x1E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Wire:
    """How the results of a layer travel, and their gradients.

    The layers take each of these as the argument that is named with it.

    Attributes:
        label: names the exchanges in errors. Wires that differ in nothing
            else are equal.
        dtype: `wire_dtype`, of results and their gradients between ranks:
            "float32", "bfloat16" or "float16". The sums over a sample's ids
            are rounded once, relative error at most 2^-8 (bfloat16) or 2^-11
            (float16, in its range).
        rounding: `wire_rounding`, to a 16-bit dtype: "nearest", or
            "stochastic", whose errors have mean zero and do not add up over
            steps.
        packed: `wire_packing`, pack those numbers, without loss: about 15%
            fewer bytes in float32, 30% in bfloat16, for about 20 ns of
            processor time a number. Pays on links of about 100 Mbit/s.

    Raises:
        ValueError: for a value outside of these.
    """

    label: str = dataclasses.field(default="", compare=False)
    dtype: checks.WireDtype = "float32"
    rounding: checks.Rounding = "nearest"
    packed: bool = False

    def __post_init__(self) -> None:
        dtype = getattr(self.dtype, "name", self.dtype)  # of a tf.DType
        object.__setattr__(self, "dtype", dtype)
        where = f"layer '{self.label}'" if self.label else "a layer"
        checks.one_of("wire_dtype", dtype, checks.WIRE_DTYPES, where)
        checks.one_of("wire_rounding", self.rounding, checks.ROUNDINGS, where)

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> Wire:
        """Takes what it is made of out of a layer's keyword arguments."""
        label = arguments.get("name") or ""
        removed = arguments.pop("learn_frequent_ids", False)
        refuse_removed("learn_frequent_ids", removed, f"layer '{label}'")
        given = {
            field: arguments.pop(name)
            for name, field in _FIELDS.items()
            if name in arguments
        }
        return cls(label, **given)

    def arguments(self) -> dict[str, Any]:
        """A layer's arguments that make this value."""
        return {name: getattr(self, field) for name, field in _FIELDS.items()}

    @property
    def bytes_of_number(self) -> int:
        """Bytes that a number takes between ranks, unless packed."""
        return int(tf.as_dtype(self.dtype).size)

    def seeds(self, rank: int) -> list[tf.Tensor]:
        """Numbers to round results and gradients by, new in every step."""
        if self.rounding == "nearest":
            return [tf.zeros([], tf.int64)] * 2
        # Ranks that have set the same seed must not round alike.
        drawn = tf.random.uniform([2], 0, tf.int64.max, tf.int64)
        return tf.unstack(drawn ^ (rank * _SCATTER % 2**63))


# By the names of the layers' arguments, under which configs have them too.
_FIELDS = {
    "wire_dtype": "dtype",
    "wire_rounding": "rounding",
    "wire_packing": "packed",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A column of the input that is looked up in a table.

    Attributes:
        name: for messages.
        table: index of the table among those of the lookup.
        spec: the part of that table this rank holds.
        combiner: what happens to the rows of a sample.
        out_of_range: what an id outside of the table does.
        unique: whether unique rows travel, not sums of rows.
        keys: `KeyShard` of a table whose vocabulary grows, None of others.
    """

    name: str
    table: int
    spec: ShardSpec
    combiner: Combiner = "sum"
    out_of_range: OutOfRange = "error"
    unique: bool = False
    keys: Any = None

    @property
    def placement(self) -> FeaturePlacement:
        """Where the rows live, as the ops need it."""
        return FeaturePlacement(
            self.name,
            self.spec.rows,
            self.spec.dim,
            self.spec.row_parts,
            self.spec.column_parts,
            self.spec.ranks,
        )
