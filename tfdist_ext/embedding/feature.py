# SPDX-License-Identifier: Apache-2.0
"""Inputs of a lookup: ids, features and the wire format of results."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist_ext.ops import id_ops
from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import Combiner
from tfdist_ext.tables.checks import OutOfRange
from tfdist_ext.tables.checks import refuse_removed
from tfdist_ext.tables.placement import FeaturePlacement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Keywords


@dataclasses.dataclass(frozen=True)
class Ids:
    """Lists of ids, one list per sample, in CSR format.

    Attributes:
        values: int32 or int64 `[n]`, the ids of all lists.
        row_splits: int64 `[b + 1]`; sample s has the ids
            `values[row_splits[s] : row_splits[s + 1]]`.
        weights: float32 `[n]`, or `[0]` if all weights are 1.
    """

    values: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor


_SCATTER = 0x1E3779B97F4A7C15


@dataclasses.dataclass(frozen=True)
class Wire:
    """The wire format of a layer's results and of their gradients.

    Each attribute except `label` is an argument of the layers, whose name is
    given below.

    Attributes:
        label: the name of the exchanges in errors; it is not compared.
        dtype: `wire_dtype`, the dtype in which results and their gradients are
            sent: "float32", "bfloat16", "float16" or "int8". The sum over a
            sample's ids is rounded once, with a relative error of at most
            2^-8 (bfloat16) or 2^-11 (float16, within its range). "int8" sends
            blocks of 64 numbers as 64 bytes and a float32 scale, the largest
            magnitude of the block / 127. The error is at most half a scale,
            or less than one scale with stochastic rounding, so numbers much
            smaller than the largest of their block lose most of their
            digits. NaN and infinity arrive as NaN. It costs about 10 ns of
            CPU time per number and is not available for tables on GPUs.
        rounding: `wire_rounding`, the rounding to 16 or 8 bits: "nearest",
            or "stochastic", whose errors have mean zero and do not accumulate
            over steps.
        packed: `wire_packing`, whether numbers are compressed without loss. It
            saves about 15% of the bytes in float32 and 30% in bfloat16, and
            costs about 20 ns of CPU time per number. It pays off on links of
            about 100 Mbit/s.

    Raises:
        ValueError: if an attribute has a value that is not allowed.
    """

    label: str = dataclasses.field(default="", compare=False)
    dtype: checks.WireDtype = "float32"
    rounding: checks.Rounding = "nearest"
    packed: bool = False

    def __post_init__(self) -> None:
        dtype = getattr(self.dtype, "name", self.dtype)  # a tf.DType
        object.__setattr__(self, "dtype", dtype)
        where = f"layer '{self.label}'" if self.label else "a layer"
        checks.one_of("wire_dtype", dtype, checks.WIRE_DTYPES, where)
        checks.one_of("wire_rounding", self.rounding, checks.ROUNDINGS, where)
        if dtype == "int8" and self.packed:
            raise ValueError(
                "Argument `wire_packing` is for floats: the codes of "
                "wire_dtype='int8' cannot be packed further. Received: "
                f"wire_packing=True ({where}). Leave one of them out."
            )

    @classmethod
    def taken_from(cls, arguments: Keywords) -> Wire:
        """Removes the arguments of the wire format from keyword arguments.

        Args:
            arguments: a layer's keyword arguments.

        Returns:
            The wire format.
        """
        label = arguments.get("name") or ""
        removed = arguments.pop("learn_frequent_ids", False)
        refuse_removed("learn_frequent_ids", removed, f"layer '{label}'")
        given = {
            field: arguments.pop(name)
            for name, field in _FIELDS.items()
            if name in arguments
        }
        return cls(label, **given)

    def arguments(self) -> Keywords:
        """Returns the layer arguments that create this wire format."""
        return {name: getattr(self, field) for name, field in _FIELDS.items()}

    @property
    def bytes_of_number(self) -> float:
        """Bytes per number between ranks, without packing."""
        if self.dtype == "int8":
            return id_ops.INT8_BYTES
        return float(tf.as_dtype(self.dtype).size)

    def seeds(self, rank: int) -> list[tf.Tensor]:
        """Returns seeds for rounding results and gradients, new every step."""
        if self.rounding == "nearest":
            return [tf.zeros([], tf.int64)] * 2
        # Ranks may have set the same seed, but must not round identically.
        drawn = tf.random.uniform([2], 0, tf.int64.max, tf.int64)
        return tf.unstack(drawn ^ (rank * _SCATTER % 2**63))


# Attributes of `Wire` by the names of layer arguments, also used in configs.
_FIELDS = {
    "wire_dtype": "dtype",
    "wire_rounding": "rounding",
    "wire_packing": "packed",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """An input that is looked up in a table.

    Attributes:
        name: the feature's name, for errors.
        table: the index of the feature's table among the lookup's tables.
        spec: the part of the table that this rank holds.
        combiner: how the rows of a sample are combined.
        out_of_range: what to do with an id outside of the table.
        unique: whether unique rows are sent instead of sums of rows.
        keys: the `KeyShard` of a dynamic vocabulary, otherwise None.
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
        """The placement of the rows, for the ops."""
        return FeaturePlacement(
            self.name,
            self.spec.rows,
            self.spec.dim,
            self.spec.row_parts,
            self.spec.column_parts,
            self.spec.ranks,
        )
