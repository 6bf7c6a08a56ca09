# SPDX-License-Identifier: Apache-2.0
"""Op on batches: the samples of one rank.

`tests/reference/batches.py` has the same made of stock ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library

DENSE, SPARSE = 0, -1


def slice_of_rank(
    parts: Sequence[tf.Tensor],
    kinds: Sequence[int],
    rank: int,
    world_size: int,
) -> list[tf.Tensor]:
    """Copies samples `[rank * n // W, (rank + 1) * n // W)` of values.

    Args:
        parts: the tensors of all values, one value after the other.
        kinds: of every value. `DENSE` is one tensor `[n, ...]`; `SPARSE` the
            three of a SparseTensor; k > 0 the flat values of a RaggedTensor
            and its k row splits, the outermost first.
        rank: whose samples.
        world_size: W.

    Returns:
        The same parts of these samples, in memory of their own. The size of
        a dense one is known if that of the whole is, unless it is 0.

    Raises:
        tf.errors.InvalidArgumentError: a tensor without samples, malformed
            row splits, or parts that are no SparseTensor.
    """
    return list(
        library().tfdist_slice_of_rank(
            parts, kinds=list(kinds), rank=rank, world_size=world_size
        )
    )
