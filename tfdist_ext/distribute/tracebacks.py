# SPDX-License-Identifier: Apache-2.0
"""Shows the error that ends a rank: the reason first, few frames after it.

Methods of Keras are wrapped by this package, some several times, and each
wrapper is a frame. `tf.debugging.disable_traceback_filtering()` shows them.
"""

from __future__ import annotations

import pathlib
import re
import sys
import types
from typing import Any

import tensorflow as tf

_PACKAGE = pathlib.Path(__file__).parents[1]
_LIBRARIES = ("keras", "tf_keras", "tensorflow")
# What TensorFlow puts before the reason.
_PLACE = re.compile(r"\{\{function_node [^}]*\}\} *")
_HEAD = re.compile(
    r"\s|$|Graph execution error|Detected at node|\d+ root error|node "
    r"|<stack traces unavailable>"
)

_before: Any = None
_name = ""


def install(name: str) -> None:
    """Shows errors that end this process in short form from now on.

    Args:
        name: of this rank, put before the reason; "" for none.
    """
    global _before, _name
    _name = name
    if _before is None:
        _before, sys.excepthook = sys.excepthook, _show


def _show(kind: Any, error: Any, traceback: Any) -> None:
    filtered = tf.debugging.is_traceback_filtering_enabled()
    if filtered and issubclass(kind, Exception):
        print(f"{_name}{reason(error)}", file=sys.stderr)
        _shorten(error)
        traceback = error.__traceback__
    _before(kind, error, traceback)


def reason(error: BaseException) -> str:
    """The kind of an error and the line of its message that says why."""
    lines = _PLACE.sub("", str(error)).splitlines()
    found = next((line for line in lines if not _HEAD.match(line)), "")
    return f"{type(error).__name__}: {found}"


def _shorten(error: BaseException | None) -> None:
    """Leaves out frames, also of the errors that have led to this one."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = without_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def without_frames(
    traceback: types.TracebackType | None,
) -> types.TracebackType | None:
    """A traceback without frames of this package, Keras and TensorFlow.

    All of it where there are no others.
    """
    frames = []
    part = traceback
    while part is not None:
        frames.append(part)
        part = part.tb_next
    kept = [each for each in frames if not _is_left_out(each)]
    shown: types.TracebackType | None = None
    for each in reversed(kept):
        shown = types.TracebackType(
            shown, each.tb_frame, each.tb_lasti, each.tb_lineno
        )
    return shown or traceback


def _is_left_out(part: types.TracebackType) -> bool:
    frame = part.tb_frame
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    path = pathlib.Path(frame.f_code.co_filename)
    return module in _LIBRARIES or _PACKAGE in path.parents
