# SPDX-License-Identifier: Apache-2.0
"""The stock ways to a SavedModel, which lead to `export` or say why not.

They would write ops that nothing without this package can load.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import keras_internals
from tfdist_ext.serving import exporting
from tfdist_ext.serving.served_model import our_ops

keras = tf.keras


class _Saving(threading.local):
    is_public: bool = False


_saving = _Saving()


def _has_tables(model: Any) -> bool:
    if hasattr(model, "as_model"):
        return True
    return isinstance(model, keras.Model) and any(
        getattr(layer, "looks_up_tables", False)
        for layer in keras_internals.layers_of(model)
    )


def export(
    original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> Any:
    if not _has_tables(model):
        return original(model, filepath, *args, **kwargs)
    bound = inspect.signature(original).bind(model, filepath, *args, **kwargs)
    form = bound.arguments.get("format", "tf_saved_model")
    if form != "tf_saved_model":
        raise ValueError(
            f"Model '{model.name}' has sparse layers of tfdist_ext and can "
            f"only be exported as a SavedModel. Received: format='{form}' for "
            f"'{filepath}'. Convert what tfdist_ext.export(model, path) "
            "writes: its ops are TensorFlow's."
        )
    signature = bound.arguments.get("input_signature")
    return exporting.export(model, filepath, inputs=_one_input(signature))


def _one_input(signature: Any) -> Any:
    """What a model takes, of the arguments of its call."""
    if isinstance(signature, Sequence):
        if len(signature) != 1:
            raise ValueError(
                "Argument `input_signature` must have one element, the nest "
                f"that the model takes. Received: {signature}."
            )
        return signature[0]
    return signature


def save(
    original: Any,
    obj: Any,
    export_dir: Any,
    signatures: Any = None,
    options: Any = None,
) -> Any:
    if _has_tables(obj):
        if signatures is not None or options is not None:
            given = "options" if signatures is None else "signatures"
            raise ValueError(
                f"tf.saved_model.save of model '{obj.name}', which has sparse "
                f"layers of tfdist_ext, takes no `{given}`. Received: "
                f"'{export_dir}'. Call tfdist_ext.export(model, path, "
                "inputs=...), which makes the signature `serving_default`."
            )
        return exporting.export(obj, export_dir)
    _saving.is_public = True
    try:
        return original(obj, export_dir, signatures, options)
    finally:
        _saving.is_public = False


def verify(original: Any, graph_def: Any, allowed: Any) -> Any:
    """Refuses our ops, unless they are allowed by name."""
    if _saving.is_public and "Tfdist" not in (allowed or ()):
        ours = our_ops(graph_def)
        if ours:
            raise ValueError(
                "What is saved runs lookups in tables of tfdist_ext "
                f"({', '.join(ours)}), and nothing without this package "
                "could load it. Make it a keras.Model and call tfdist_ext."
                "export(model, path). To save it all the same, pass options="
                "tf.saved_model.SaveOptions(namespace_whitelist=['Tfdist'])."
            )
    return original(graph_def, allowed)
