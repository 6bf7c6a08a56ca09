# SPDX-License-Identifier: Apache-2.0
"""Which code created an op of a graph: a user's, Keras's or this package's."""

from __future__ import annotations

import functools
import pathlib
import sys
from typing import Any

import tensorflow as tf

_PACKAGE = pathlib.PurePath(__file__).parent


@functools.cache
def _folder_of(name: str) -> pathlib.PurePath | None:
    """The folder of an imported library, or None."""
    file = getattr(sys.modules.get(name), "__file__", None)
    return None if file is None else pathlib.PurePath(file).parent


def _is_in(file: pathlib.PurePath, *libraries: str) -> bool:
    folders = filter(None, map(_folder_of, libraries))
    return any(map(file.is_relative_to, folders))


def _is_between(file: pathlib.PurePath) -> bool:
    """Whether code of a file creates ops for its caller."""
    if _is_in(file, "tensorflow") or file.is_relative_to(_PACKAGE):
        return True
    in_keras = _is_in(file, "keras", "tf_keras")
    return in_keras and not {"ops", "backend"}.isdisjoint(file.parts)


def calls(op: tf.Operation) -> list[tuple[pathlib.PurePath, str, int]]:
    """File, function and line of the calls that created an op.

    The outermost call is first. Files without a path, of code that was
    created at run time, are left out.
    """
    frames: Any = op.traceback or ()
    found = [(pathlib.PurePath(f.filename), f.name, f.lineno) for f in frames]
    return [each for each in found if each[0].is_absolute()]


def line_of(op: tf.Operation) -> str:
    """`file.py:12` of the innermost call outside of libraries."""
    for file, _, line in reversed(calls(op)):
        in_library = _is_in(file, "tensorflow", "keras", "tf_keras")
        if not in_library and not file.is_relative_to(_PACKAGE):
            return f"{file.name}:{line}"
    return "unknown line"


def is_of_keras(op: tf.Operation) -> bool:
    """Whether Keras's own code created an op, such as a regularizer's.

    For an op created in `keras.ops`, the caller counts.
    """
    for file, _, _ in reversed(calls(op)):
        if not _is_between(file):
            return _is_in(file, "keras", "tf_keras")
    return False


def is_of_package(op: tf.Operation) -> bool:
    """Whether an op is of this package, or one that its code created."""
    if op.type.startswith("Tfdist>"):
        return True
    for file, _, _ in reversed(calls(op)):
        if not _is_in(file, "tensorflow"):
            return file.is_relative_to(_PACKAGE)
    return False


def is_of_update(op: tf.Operation) -> bool:
    """Whether an optimizer created an op to update a variable."""
    optimizers = _PACKAGE / "optimizers" / "supported.py"
    updates = (_PACKAGE / "strategy" / "extended.py", "_update")
    return any(
        file == optimizers or (file, name) == updates
        for file, name, _ in calls(op)
    )
