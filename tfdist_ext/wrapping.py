# SPDX-License-Identifier: Apache-2.0
"""Puts functions of this package around those of TensorFlow and Keras."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist_ext import marks


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Any:
    """Replaces `owner.name` by a call of `wrapper` with it; twice is once.

    Args:
        owner: a class or a module.
        name: of its method or function.
        wrapper: called with the original, then with what the original would
            have been called with.

    Returns:
        What stands in its place.
    """
    original = getattr(owner, name)
    key = f"{wrapper.__module__}.{wrapper.__qualname__}"
    known = marks.wrappers(original)
    if key in known:
        return original

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    marks.set_wrappers(wrapped, (*known, key))
    setattr(owner, name, wrapped)
    return wrapped
