# SPDX-License-Identifier: Apache-2.0
"""Model-parallel sparse layers for TensorFlow, trained with Keras `fit`.

Names are imported at their first use: the launcher does not load TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdist_ext import layers
    from tfdist_ext import optimizers
    from tfdist_ext.distribute.strategy import HybridParallelStrategy

__all__ = ["HybridParallelStrategy", "layers", "optimizers"]


def __getattr__(name: str) -> Any:
    if name == "HybridParallelStrategy":
        strategy = importlib.import_module("tfdist_ext.distribute.strategy")
        return strategy.HybridParallelStrategy
    if name in __all__:
        return importlib.import_module(f"tfdist_ext.{name}")
    raise AttributeError(f"module 'tfdist_ext' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
