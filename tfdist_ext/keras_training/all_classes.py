# SPDX-License-Identifier: Apache-2.0
"""Wraps a method of all classes that come from one, now and later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist_ext import keras_objects
from tfdist_ext import marks
from tfdist_ext.wrapping import wrap


def wrap_classes(
    base: type[Any], name: str, wrapper: Callable[..., Any]
) -> None:
    """Wraps a method wherever a class that comes from `base` has its own.

    Args:
        base: of Keras; its own method stays as it is.
        name: of the method.
        wrapper: see `wrapping.wrap`.
    """
    if not marks.is_extended(base):
        marks.set_extended(base)
        _wrap_later(base, name, wrapper)
    known = list(base.__subclasses__())
    while known:
        each = known.pop()
        known += each.__subclasses__()
        _wrap_own(each, name, wrapper)


def _wrap_later(base: Any, name: str, wrapper: Callable[..., Any]) -> None:
    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        _wrap_own(cls, name, wrapper)

    base.__init_subclass__ = classmethod(init_subclass)


def _wrap_own(cls: type[Any], name: str, wrapper: Callable[..., Any]) -> None:
    if name in vars(cls) and not keras_objects.is_container(cls):
        # Called as it is, and what it calls is converted or not as before.
        wrap(cls, name, wrapper).autograph_info__ = {}
