# SPDX-License-Identifier: Apache-2.0
"""How results travel between ranks, as one value."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfdist_ext.tables import checks
from tfdist_ext.tables import choices
from tfdist_ext.tables.removed import refuse_removed

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
    dtype: choices.WireDtype = "float32"
    rounding: choices.Rounding = "nearest"
    packed: bool = False

    def __post_init__(self) -> None:
        dtype = getattr(self.dtype, "name", self.dtype)  # of a tf.DType
        object.__setattr__(self, "dtype", dtype)
        where = f"layer '{self.label}'" if self.label else "a layer"
        checks.one_of("wire_dtype", dtype, choices.WIRE_DTYPES, where)
        checks.one_of("wire_rounding", self.rounding, choices.ROUNDINGS, where)

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
