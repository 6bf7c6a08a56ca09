# SPDX-License-Identifier: Apache-2.0
"""Words that arguments may be, each kind of them in one place."""

from __future__ import annotations

from typing import Any
from typing import Literal
from typing import get_args

Placement = Literal[
    "auto",
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "grid",
    "sparsecore",
    "default_device",
]
# Of the rows of a sample; where a table has none, they are kept one by one.
Combiner = Literal["mean", "sum", "sqrtn"]
OutOfRange = Literal["error", "ignore"]
TableDtype = Literal["float32", "bfloat16"]
# Of a table and its slots: the rank's GPU, or the memory of its host.
Storage = Literal["device", "host"]
# Of vocabularies that grow.
Evict = Literal["lru", "lfu"]
KeyDtype = Literal["int64", "string"]
Full = Literal["error", "shared_row"]
Unadmitted = Literal["zeros", "shared_row"]
# Of numbers between ranks, and how they are rounded to 16 bits.
WireDtype = Literal["float32", "bfloat16", "float16"]
Rounding = Literal["nearest", "stochastic"]
# Between ranks of one host: through memory that they share, where they can.
Transport = Literal["auto", "tcp"]
# Who carries what ranks exchange: this package, or the user's Horovod.
Engine = Literal["tfdist", "horovod"]
# When a step is compared with one of one process, see `checking`.
Check = Literal["auto", "always", "error", "off"]

# The last two of them are the names of keras-rs: partitioned in whatever way,
# and an ordinary variable on every rank.
PLACEMENTS: tuple[str, ...] = get_args(Placement)
COMBINERS: tuple[str, ...] = get_args(Combiner)
POLICIES: tuple[str, ...] = get_args(OutOfRange)
TABLE_DTYPES: tuple[str, ...] = get_args(TableDtype)
STORAGES: tuple[str, ...] = get_args(Storage)
EVICTIONS: tuple[str, ...] = get_args(Evict)
KEY_DTYPES: tuple[str, ...] = get_args(KeyDtype)
FULL: tuple[str, ...] = get_args(Full)
UNADMITTED: tuple[str, ...] = get_args(Unadmitted)
WIRE_DTYPES: tuple[str, ...] = get_args(WireDtype)
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
TRANSPORTS: tuple[str, ...] = get_args(Transport)
ENGINES: tuple[str, ...] = get_args(Engine)
CHECKS: tuple[str, ...] = get_args(Check)

# Shorter names of placements, accepted wherever a placement is named.
_SHORT = {
    "column": "column_wise",
    "replicated": "data_parallel",
    "row": "row_wise",
    "table": "table_wise",
}


def full_placement(name: Any) -> Any:
    """The name of a placement in the field's words; all else as it is."""
    return _SHORT.get(name, name) if isinstance(name, str) else name
