# SPDX-License-Identifier: Apache-2.0
"""Words that arguments may be, each kind of them in one place."""

from __future__ import annotations

from typing import Literal
from typing import get_args

Combiner = Literal["mean", "sum", "sqrtn"]
OutOfRange = Literal["error", "ignore"]
TableDtype = Literal["float32", "bfloat16"]
# Of numbers between ranks, and how they are rounded to 16 bits.
WireDtype = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic"]

COMBINERS: tuple[str, ...] = get_args(Combiner)
POLICIES: tuple[str, ...] = get_args(OutOfRange)
TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
WIRE_DTYPES: tuple[str, ...] = get_args(WireDtype)
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
