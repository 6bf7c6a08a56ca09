# SPDX-License-Identifier: Apache-2.0
"""Model-parallel sparse layers for TensorFlow, trained with Keras `fit`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["HybridParallelStrategy", "layers", "optimizers"]


# Loaded when first used: the launcher and the planner need no TensorFlow.
def __getattr__(name: str) -> Any:
    if name == "HybridParallelStrategy":
        module = importlib.import_module("tfdist_ext.distribute.strategy")
        return module.HybridParallelStrategy
    if name in __all__:
        return importlib.import_module(f"tfdist_ext.{name}")
    raise AttributeError(f"module 'tfdist_ext' has no attribute {name!r}")
