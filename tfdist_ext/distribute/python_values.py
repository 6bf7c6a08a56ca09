# SPDX-License-Identifier: Apache-2.0
"""Numbers and arrays of variables, as of variables in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist_ext import tensorflow_internals as internals


def install() -> None:
    """Lets Python and numpy convert variables of strategies; twice is once.

    Callbacks say `int(model.iterations)` or `np.array(rate)`, which are errors
    with TensorFlow's variables of strategies. `bool` stays as it is: TensorFlow
    itself asks by it whether there is a variable.
    """
    for name, convert in _CONVERSIONS.items():
        if not hasattr(internals.DistributedVariable, name):
            setattr(internals.DistributedVariable, name, convert)


def _reading(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def converted(variable: Any) -> Any:
        return convert(variable.read_value())

    return converted


def _array(variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:
    """What numpy reads; of a scalar TensorFlow returns no array."""
    del copy  # It is one.
    return np.asarray(variable.numpy(), dtype)


_CONVERSIONS: dict[str, Callable[..., Any]] = {
    "__array__": _array,
    "__complex__": _reading(complex),
    "__float__": _reading(float),
    "__int__": _reading(int),
}
