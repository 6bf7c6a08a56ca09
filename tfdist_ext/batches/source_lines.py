# SPDX-License-Identifier: Apache-2.0
"""The line of a program that has made an op."""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf

_KERAS = {"keras", "tf_keras"}
_LIBRARIES = {"tensorflow", "tfdist_ext", *_KERAS}
# Folders of code that makes ops for others.
_BETWEEN = {"tensorflow", "tfdist_ext", "ops", "backend"}


def line_of(op: tf.Operation) -> str:
    """`file.py:12` of the innermost frame outside of libraries."""
    frames: Any = op.traceback or ()
    for frame in reversed(list(frames)):
        parts = pathlib.PurePath(frame.filename).parts
        if not _LIBRARIES.intersection(parts):
            return f"{parts[-1]}:{frame.lineno}"
    return "no line of the program is known"


def is_of_keras(op: tf.Operation) -> bool:
    """Whether Keras's own code has made an op, such as a regularizer's.

    Of what `keras.ops` makes, who calls it counts.
    """
    frames: Any = op.traceback or ()
    for frame in reversed(list(frames)):
        parts = pathlib.PurePath(frame.filename).parts
        if not _BETWEEN.intersection(parts):
            return bool(_KERAS.intersection(parts))
    return False
