# SPDX-License-Identifier: Apache-2.0
"""Variables that hold one rank's part of a table, and of its slots."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.marks import shard_spec
from tfdist_ext.sharding import checkpoint_slices
from tfdist_ext.sharding import kernel_reads
from tfdist_ext.tables.choices import Storage
from tfdist_ext.tables.shard_spec import ShardSpec

if TYPE_CHECKING:
    from tfdist_ext.collectives.collectives import Collectives


class _Pending(threading.local):
    spec: ShardSpec | None = None
    storage: Storage | None = None


_pending = _Pending()


@contextlib.contextmanager
def creating(spec: ShardSpec) -> Iterator[None]:
    """Variables created inside are this rank's part of a table."""
    _pending.spec = spec if spec.partitioned else None
    _pending.storage = spec.storage
    # Under a strategy, `extended.py` goes before that.
    on_host = spec.storage == "host" and not spec.partitioned
    try:
        with tf.device("CPU:0") if on_host else contextlib.nullcontext():
            yield
    finally:
        _pending.spec = _pending.storage = None


def storage_for(colocate_with: Any) -> Storage:
    """Where a variable being created has to lie: see `ShardSpec`.

    Args:
        colocate_with: see `spec_for`.
    """
    spec = shard_spec(colocate_with)
    return _pending.storage or (spec.storage if spec else "device")


def spec_for(colocate_with: Any) -> ShardSpec | None:
    """What a variable being created holds, None if it is no shard.

    Args:
        colocate_with: the variable it belongs to, given by optimizers for
            slots, or None.
    """
    return _pending.spec or shard_spec(colocate_with)


def is_shard(variable: Any) -> bool:
    """Whether a variable is a part of a partitioned table or of a slot."""
    return shard_spec(variable) is not None


def mark(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Makes a local variable the shard that `spec` describes.

    A slot without the table's shape (a step counter, say) stays local.
    """
    rows = variable.shape[0] if variable.shape.rank else None
    matches = rows == spec.local_shape[0] and (
        variable.shape.rank == 1 or variable.shape == spec.local_shape
    )
    if matches:
        hold(variable, spec, collectives)
        if _pending.spec is not None:  # slots are in nobody's hands
            kernel_reads.refuse(variable)


def hold(
    variable: tf.Variable, spec: ShardSpec, collectives: Collectives
) -> None:
    """Says what a variable of that shape holds, from now on."""
    marks.set_shard_spec(variable, spec)
    checkpoint_slices.attach(variable, spec, collectives)
