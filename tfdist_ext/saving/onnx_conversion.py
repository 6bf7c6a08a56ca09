# SPDX-License-Identifier: Apache-2.0
"""A SavedModel, whose tables are placeholders, as an ONNX model."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.saving.onnx_tables import array_of

# The opset of ONNX that models are written in.
OPSET = 18
_OTHERWISE = (
    "tfdist_ext.export(model, path) writes the model for TensorFlow Serving."
)


def require_packages() -> None:
    """Imports the optional packages.

    Raises:
        ImportError: one of them is not installed.
    """
    try:
        import onnx  # noqa: F401
        import tf2onnx  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "tfdist_ext.export_onnx needs the packages tf2onnx and onnx on "
            "rank 0: pip install tf2onnx onnx."
        ) from error


def converted(
    folder: str, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Any, list[tuple[str, str]]]:
    """Converts a SavedModel to ONNX, without the rows of its tables.

    Args:
        folder: the folder of the SavedModel.
        inputs: names of the inputs of `serving_default`, in order.
        outputs: names of its outputs, in order.

    Returns:
        The `onnx.ModelProto`, and the arrays of tables that it lacks: each as
        the table's name and the array's. The name of the tensor is
        `name_of_array`.

    Raises:
        ValueError: ONNX cannot express the model.
    """
    import tf2onnx

    loaded = tf.saved_model.load(folder)  # owns the variables
    call, specs = _flat_function(loaded, inputs, outputs)
    with _errors_of_converter() as errors:
        model, _ = tf2onnx.convert.from_function(
            call,
            input_signature=specs,
            opset=OPSET,
            custom_op_handlers={
                # The converter only calls handlers with arguments.
                "Erfc": (_convert_erfc, [None]),
                "SelectV2": (_convert_select, [None]),
            },
        )
    _check(model, errors)
    arrays = _name_arrays(model.graph)
    _put_in_order(model.graph.input, inputs)
    _put_in_order(model.graph.output, outputs)
    return model, arrays


def name_of_array(table: str, part: str) -> str:
    """The name of a table's array in the ONNX model."""
    return f"tables/{table}/{part}"


def _flat_function(
    loaded: Any, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[Any, list[tf.TensorSpec]]:
    """The model as a function of positional tensors, with their specs."""
    signature = loaded.signatures["serving_default"]
    known = signature.structured_input_signature[1]
    specs = [
        tf.TensorSpec(known[name].shape, known[name].dtype, name)
        for name in inputs
    ]

    @tf.function(input_signature=specs, autograph=False)
    def call(*given: tf.Tensor) -> dict[str, tf.Tensor]:
        found = signature(**dict(zip(inputs, given, strict=True)))
        # In ONNX, no tensor is both an input and an output, or two outputs.
        return {name: tf.identity(found[name]) for name in outputs}

    return call, specs


class _Errors(logging.Handler):
    """Collects messages of a logger.

    Attributes:
        messages: the messages.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def _errors_of_converter() -> Iterator[list[str]]:
    """Collects the errors of tf2onnx, which logs them and continues."""
    logger, handler = logging.getLogger("tf2onnx"), _Errors()
    propagated = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield handler.messages
    finally:
        logger.propagate = propagated
        logger.removeHandler(handler)


def _convert_erfc(ctx: Any, node: Any, name: str, args: Any) -> None:
    """Writes erfc, as of an exact GELU, as 1 - erf, for tf2onnx."""
    import onnx

    value, result = node.input[0], node.output[0]
    dtype, shape = ctx.get_dtype(result), ctx.get_shape(result)
    number = np.ones([], onnx.helper.tensor_dtype_to_np_dtype(dtype))
    one = ctx.make_const(f"{name}/one", number)
    erf = ctx.make_node("Erf", [value], dtypes=[dtype], shapes=[shape])
    node.type = "Sub"
    ctx.replace_inputs(node, [one.output[0], erf.output[0]])


def _convert_select(ctx: Any, node: Any, name: str, args: Any) -> None:
    """Writes tf.where as Where, for tf2onnx, which multiplies by 0 and 1.

    A value that is not selected may be infinite or NaN.
    """
    node.type = "Where"


def _check(model: Any, errors: Sequence[str]) -> None:
    """Refuses a model with ops that ONNX does not have."""
    import onnx

    unknown = {
        node.op_type
        for node in nodes_of(model.graph)
        if node.domain or not onnx.defs.has(node.op_type, OPSET)
    }
    if unknown:
        raise ValueError(
            "The model cannot be exported to ONNX, which has no ops for "
            f"TensorFlow's {', '.join(sorted(unknown))}. Replace the layers "
            f"that run them, or compute them outside of the model. {_OTHERWISE}"
        )
    if errors:
        raise ValueError(
            "The model cannot be exported to ONNX, because tf2onnx reports: "
            f"{errors[0][:500]}. Replace the layers in this message, or "
            f"compute them outside of the model. {_OTHERWISE}"
        )


def nodes_of(graph: Any) -> Iterator[Any]:
    """The nodes of an ONNX graph and of the graphs inside of them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from nodes_of(attribute.g)
            for inner in attribute.graphs:
                yield from nodes_of(inner)


def _name_arrays(graph: Any) -> list[tuple[str, str]]:
    """Removes the placeholders of tables, and names them after the tables."""
    found = {
        each.name: array
        for each in graph.input
        if (array := array_of(each.name)) is not None
    }
    names = {old: name_of_array(*array) for old, array in found.items()}
    for field in (graph.input, graph.initializer):
        kept = [each for each in field if each.name not in names]
        del field[:]
        field.extend(kept)
    for node in nodes_of(graph):
        for index, tensor in enumerate(node.input):
            if tensor in names:
                node.input[index] = names[tensor]
            elif (inner := array_of(tensor)) is not None:
                raise ValueError(
                    "The model cannot be exported to ONNX, because it looks "
                    f"up rows of table '{inner[0]}' in a loop or "
                    "a branch (tf.while_loop, tf.map_fn, tf.cond). Look them "
                    f"up before it. {_OTHERWISE}"
                )
    # It would contradict the dtypes of tables in 16 bits.
    del graph.value_info[:]
    return sorted(set(found.values()))


def _put_in_order(field: Any, names: Sequence[str]) -> None:
    """Orders the inputs or outputs of a graph."""
    by_name = {each.name: each for each in field}
    if set(by_name) != set(names):
        raise ValueError(
            "The model cannot be exported to ONNX: the converted model has "
            f"the tensors {sorted(by_name)}, and the model {sorted(names)}. "
            f"Give its inputs and outputs other names. {_OTHERWISE}"
        )
    ordered = [by_name[name] for name in names]
    del field[:]
    field.extend(ordered)
