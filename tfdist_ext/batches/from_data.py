# SPDX-License-Identifier: Apache-2.0
"""Whether a value of a step depends on its batch.

What does not (a weight, a counter, a constant) is the same on all ranks.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_INPUTS = {"IteratorGetNext", "OptionalGetValue"}
_STATE = (tf.resource, tf.variant)


def depends_on_data(value: tf.Tensor) -> bool:
    """Whether a tensor of a graph is computed from inputs of that graph.

    Args:
        value: of a graph. An eager tensor does not tell; it may be.
    """
    if not tf.is_symbolic_tensor(value):
        return True
    return any(map(_is_input, _sources(value)))


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


def _is_input(op: tf.Operation) -> bool:
    if op.type in _INPUTS:
        return True
    if op.type != "Placeholder" or op.outputs[0].dtype in _STATE:
        return False
    return not _is_eager_constant(op.outputs[0])


def _is_eager_constant(placeholder: tf.Tensor) -> bool:
    """Whether a function reads an eager tensor of the program there."""
    captures: Any = getattr(placeholder.graph, "captures", ())
    return any(
        inner is placeholder and not tf.is_symbolic_tensor(outer)
        for outer, inner in captures
    )
