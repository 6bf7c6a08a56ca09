# SPDX-License-Identifier: Apache-2.0
"""What rank 0 says, known to all ranks."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives


def text_of_first_rank(
    text: str, collectives: Collectives | None, label: str
) -> str:
    """The text that rank 0 has given; all ranks must call.

    Args:
        text: of this rank.
        collectives: of the strategy; None in one process.
        label: names the exchange in errors.
    """
    if collectives is None:
        return text
    mine = text.encode() if collectives.group.rank == 0 else b""
    given = tf.constant(np.frombuffer(mine, np.uint8))
    return str(collectives.all_gather(given, label).numpy().tobytes().decode())


def tensor_of_first_rank(
    tensor: tf.Tensor, collectives: Collectives, label: str
) -> tf.Tensor:
    """Rank 0's tensor, on every rank; all ranks must call.

    Args:
        tensor: of this rank, of the same dtype and shape on all.
        collectives: of the strategy.
        label: names the exchange in errors.
    """
    sent = tensor[tf.newaxis]
    if tensor.dtype == tf.bool:
        sent = tf.cast(sent, tf.uint8)
    if collectives.group.rank > 0:
        sent = sent[:0]
    found = collectives.all_gather(sent, label)[0]
    return tf.ensure_shape(tf.cast(found, tensor.dtype), tensor.shape)


def path_to_read(path: Any, collectives: Collectives) -> Any:
    """The path from which a rank reads; all ranks must call.

    That of rank 0 counts, as when it was written. A rank that has no such
    file, on a disk of its own, reads from its own path.

    Args:
        path: of this rank; what is no path is returned as it is.
        collectives: of the strategy.
    """
    is_path = isinstance(path, str | os.PathLike)
    own = os.fspath(path) if is_path else ""
    first = text_of_first_rank(str(own), collectives, "path")
    if collectives.group.rank == 0 or first in ("", str(own)):
        return path
    found = any(tf.io.gfile.exists(first + end) for end in ("", ".index"))
    return first if found or not is_path else path
