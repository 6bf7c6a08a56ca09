# SPDX-License-Identifier: Apache-2.0
"""Constants of a graph, some of which are sizes of its batch."""

from __future__ import annotations

import tensorflow as tf


def is_constant(value: tf.Tensor) -> bool:
    """Whether a tensor of a graph follows from constants of it alone."""
    if not tf.is_symbolic_tensor(value):
        return False
    return all(op.type == "Const" for op in _sources(value))


def is_first_size(value: tf.Tensor, samples: float | None) -> bool:
    """Whether a constant is the size of a batch, which its graph fixes.

    Args:
        value: does not depend on data.
        samples: of the batch; None where the graph does not fix them.
    """
    if samples is None or not tf.is_symbolic_tensor(value):
        return False
    while value.op.type in ("Cast", "Identity"):
        value = value.op.inputs[0]
    if value.op.type != "StridedSlice":
        return False
    shape, first = map(tf.get_static_value, value.op.inputs[:2])
    if shape is None or first is None or shape.ndim != 1:
        return False
    return bool(first[0] == 0 and shape.size and shape[0] == samples)


def _sources(value: tf.Tensor) -> list[tf.Operation]:
    """The ops without inputs that a tensor of a graph is computed from."""
    known, found, pending = set(), [], [value.op]
    while pending:
        op = pending.pop()
        if op.name in known:
            continue
        known.add(op.name)
        if not op.inputs:
            found.append(op)
        pending += [each.op for each in op.inputs]
    return found
