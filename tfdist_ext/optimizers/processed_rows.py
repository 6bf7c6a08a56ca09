# SPDX-License-Identifier: Apache-2.0
"""Warns where rows of a table's gradient differ from those of Keras.

A table's gradient has one row per id, summed over all occurrences of the id
in the batch, at any number of ranks. That of `keras.layers.Embedding` has one
row per occurrence. Both train the same weights, unless a step or an optimizer
squares, clips or takes the norm of rows: the square of a sum is not the sum of
the squares.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import op_origin
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import is_of_keras
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras

# Optimizers whose update is linear in the gradient, or uses the sum of rows.
_LINEAR = (keras.optimizers.SGD, keras.optimizers.Lion)
# Ops that are linear in an input that is a gradient.
_SCALES = {"Cast", "Identity", "Neg", "Mul", "MulNoNan", "ConcatV2", "Reshape"}
_DIVIDES = {"RealDiv", "Div", "DivNoNan"}
_ADDS = {"Add", "AddV2", "AddN", "Sub"}
# Ops whose result does not depend on how often a row occurs, or that add up
# the rows of an id.
_HARMLESS = {
    "CheckNumerics",
    "IsFinite",
    "IsInf",
    "IsNan",
    "Rank",
    "Shape",
    "Size",
    "UnsortedSegmentSum",
    "ResourceScatterAdd",
    "ResourceScatterSub",
}


def warn_of_rows(gradients: Iterable[Gradient]) -> None:
    """Warns of ops that computed with rows of tables' gradients.

    Call it before an optimizer uses the gradients. It looks at the graph that
    is being traced; in eager steps it finds nothing.

    Args:
        gradients: what an optimizer is given.
    """
    sparse = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    if not any(tf.is_symbolic_tensor(each.values) for each in sparse):
        return
    of_rows: set[str] = set()
    for op in tf.compat.v1.get_default_graph().get_operations():
        _look_at(op, of_rows)


def warn_of_norm(gradients: Iterable[TensorOrSlices], name: str) -> None:
    """Warns if a norm is taken of a table's gradient.

    Args:
        gradients: tensors and IndexedSlices, or None.
        name: the function that takes the norm.
    """
    for each in gradients:
        if isinstance(each, tf.IndexedSlices) and marks.is_of_table(each):
            _warn(f"`{name}` gets")
            return


def warn_of_squares(optimizer: Optimizer, variable: Variable) -> None:
    """Warns if an optimizer would square each occurrence of a row.

    Optimizers of this package and of tf_keras sum rows first.

    Args:
        optimizer: an optimizer of Keras 3 or tf_keras.
        variable: a variable that it updates.
    """
    kind = getattr(optimizer, "inner_optimizer", optimizer).__class__
    if not KERAS_3 or not marks.is_table_like_keras(variable):
        return
    if marks.does_work_over_ranks(optimizer) or kind in _LINEAR:
        return
    trains = "trains" if is_of_keras(kind.__module__) else "may train"
    warnings.warn(
        f"Optimizer {kind.__name__} of Keras 3 gets one row per id from table "
        f"'{variable.name}' of this package: the sum of the gradients of all "
        "occurrences of the id in the batch. From keras.layers.Embedding it "
        "gets one row per occurrence, and squares each by itself. So it "
        f"{trains} other weights than with that layer where an id occurs twice "
        "in a batch. They are equal at all numbers of ranks. Optimizers of "
        "tfdist_ext.optimizers train both layers alike.",
        stacklevel=2,
    )


def _look_at(op: tf.Operation, of_rows: set[str]) -> None:
    """Adds the outputs of an op that are rows, and warns if it is not linear.

    Args:
        op: the op; all ops that make its inputs were looked at before.
        of_rows: names of tensors that are linear in rows of a table's gradient.
    """
    of_rows.update(x.name for x in op.outputs if marks.is_table_rows(x))
    if not of_rows:
        return  # this op is of the forward pass, as most are
    given = [each.name in of_rows for each in op.inputs]
    if not any(given) or op.type in _HARMLESS or op_origin.is_of_update(op):
        return
    if _is_linear(op, given) or op_origin.is_of_package(op):
        of_rows.update(x.name for x in op.outputs if x.dtype.is_floating)
    elif not op_origin.is_of_keras(op):
        _warn(f"Op {op.type} ({op_origin.line_of(op)}) computes with")


def _is_linear(op: tf.Operation, given: list[bool]) -> bool:
    """Whether an op is linear in its inputs that are given as rows."""
    if op.type in _SCALES:
        return sum(given) == 1 or op.type == "ConcatV2"
    if op.type in _DIVIDES:
        return given == [True, False]
    return op.type in _ADDS and all(given)


def _warn(what: str) -> None:
    warnings.warn(
        f"{what} the gradient of a table of this package, which has one row "
        "per id: the sum over all occurrences of the id in the batch. That of "
        "keras.layers.Embedding has one row per occurrence. So norms, clipped "
        "values and the like are other numbers where an id occurs twice. They "
        "are equal at all numbers of ranks. Use keras.layers.Embedding if "
        "they must be those of Keras.",
        stacklevel=3,
    )
