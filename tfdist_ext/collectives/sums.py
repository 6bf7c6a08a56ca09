# SPDX-License-Identifier: Apache-2.0
"""Sums over the ranks of the strategy in scope, if there is one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib


def sum_over_ranks(
    tensor: tf.Tensor, label: str, peers: Sequence[int] | None = None
) -> tf.Tensor:
    """Sum of `tensor` over the ranks of the strategy in scope.

    Args:
        tensor: of the same shape on all ranks that are summed.
        label: names the exchange in errors.
        peers: see `Collectives.sum_over_peers`; None for all ranks.
    """
    collectives = collectives_lib.active()
    if collectives is None:
        return tensor
    if peers is None or len(peers) == collectives.group.world_size:
        return collectives.all_reduce([tensor], label)[0]
    return collectives.sum_over_peers(tensor, peers, label)
