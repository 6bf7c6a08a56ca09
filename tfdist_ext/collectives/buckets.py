# SPDX-License-Identifier: Apache-2.0
"""Which dense tensors travel together."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

# Gradients are summed in buckets of about this size: large enough to use the
# link, small enough that the first bucket travels while the backward pass
# still computes the next ones (tensor fusion, Horovod).
_BUCKET_BYTES = 8 << 20


def buckets_of(tensors: Sequence[tf.Tensor]) -> list[list[int]]:
    """Indices of the tensors that travel together, what is ready first first.

    Tensors of a bucket have one dtype.
    """
    # Later variables get their gradients first, hence the reverse order.
    result: list[list[int]] = []
    sizes: dict[tf.DType, int] = {}
    current: dict[tf.DType, list[int]] = {}
    for i in reversed(range(len(tensors))):
        tensor = tensors[i]
        size = (tensor.shape.num_elements() or 1) * tensor.dtype.size
        full = sizes.get(tensor.dtype, _BUCKET_BYTES) + size > _BUCKET_BYTES
        if full:
            current[tensor.dtype] = []
            sizes[tensor.dtype] = 0
            result.append(current[tensor.dtype])
        current[tensor.dtype].append(i)
        sizes[tensor.dtype] += size
    return result
