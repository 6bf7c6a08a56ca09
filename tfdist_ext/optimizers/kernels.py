# SPDX-License-Identifier: Apache-2.0
"""Which variables the fused ops can update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.ops.library import has_gpu_kernels


def has_kernel(variable: Any) -> bool:
    """Whether the ops can update a variable.

    Args:
        variable: of TensorFlow or Keras.

    Returns:
        True for float32 or bfloat16 `[n, dim]` on a CPU, and on a GPU if the
        library has kernels for it.
    """
    on_gpu = "GPU" in (getattr(variable, "device", "") or "")
    return (
        len(variable.shape) == 2
        and tf.as_dtype(variable.dtype) in (tf.float32, tf.bfloat16)
        and (has_gpu_kernels() or not on_gpu)
    )


def is_bfloat16_table(variable: Any) -> bool:
    """Whether a variable is narrower than its slots, which stay float32.

    A step adds to a slot less than bfloat16 can tell from nothing.

    Args:
        variable: of TensorFlow or Keras.

    Returns:
        True for bfloat16 `[n, dim]` where `has_kernel` is.
    """
    return has_kernel(variable) and tf.as_dtype(variable.dtype) == tf.bfloat16
