# SPDX-License-Identifier: Apache-2.0
"""The line of a program that has made an op."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf

_LIBRARIES = ("tensorflow", "keras", "tf_keras", "tfdist_ext")


def line_of(op: tf.Operation) -> str:
    """`file.py:12` of the innermost frame outside of libraries."""
    frames: Any = op.traceback or ()
    for frame in reversed(list(frames)):
        parts = pathlib.PurePath(frame.filename).parts
        if not set(parts).intersection(_LIBRARIES):
            return f"{parts[-1]}:{frame.lineno}"
    return "no line of the program is known"


def is_of_keras_layer(op: tf.Operation) -> bool:
    """Whether Keras's own code around `Layer.call` has made an op."""
    frames: Any = op.traceback or ()
    for frame in reversed(list(frames)):
        parts = pathlib.PurePath(frame.filename).parts
        if "tensorflow" not in parts and "ops" not in parts:
            return parts[-3:] == ("src", "layers", "layer.py")
    return False
