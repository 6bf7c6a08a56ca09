# SPDX-License-Identifier: Apache-2.0
"""Numbers and arrays of variables, as of variables in one process.

Callbacks say `int(model.iterations)` or `np.array(rate)`, which are errors with
TensorFlow's variables of strategies. `bool` stays as it is: TensorFlow itself
asks by it whether there is a variable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def _reading(convert: Callable[[Any], Any]) -> Callable[..., Any]:
    def converted(original: None, variable: Any) -> Any:
        del original
        return convert(variable.read_value())

    return converted


def _array(
    original: None,
    variable: Any,
    dtype: Any = None,
    copy: bool | None = None,
) -> Any:
    """What numpy reads; of a scalar TensorFlow returns no array."""
    del original, copy  # It is one.
    return np.asarray(variable.numpy(), dtype)


# By the method's name: stages, around no original.
CONVERSIONS: dict[str, Callable[..., Any]] = {
    "__array__": _array,
    "__complex__": _reading(complex),
    "__float__": _reading(float),
    "__int__": _reading(int),
}
