# SPDX-License-Identifier: Apache-2.0
"""Model-parallel sparse layers for TensorFlow, trained with Keras `fit`.

Names are imported at their first use: the launcher does not load TensorFlow,
nor do plans.
"""

import importlib
from typing import TYPE_CHECKING
from typing import Any

if TYPE_CHECKING:
    from tfdist_ext import callbacks
    from tfdist_ext import compression
    from tfdist_ext import consistency
    from tfdist_ext import data
    from tfdist_ext import launch
    from tfdist_ext import layers
    from tfdist_ext import losses
    from tfdist_ext import metrics
    from tfdist_ext import optimizers
    from tfdist_ext.comm.measuring import measure_machine
    from tfdist_ext.optimizers.rules import scaled_rate
    from tfdist_ext.saving.deltas import apply_delta
    from tfdist_ext.saving.deltas import export_delta
    from tfdist_ext.saving.exporting import export
    from tfdist_ext.saving.onnx_files import export_onnx
    from tfdist_ext.saving.safetensors_files import export_safetensors
    from tfdist_ext.saving.safetensors_files import load_safetensors
    from tfdist_ext.strategy.strategy import HybridParallelStrategy
    from tfdist_ext.tables.placement import TablePlacement
    from tfdist_ext.tables.plan import ShardingPlan
    from tfdist_ext.tables.plan import plan
    from tfdist_ext.tables.problem import Machine
    from tfdist_ext.tables.table_config import DynamicVocabulary
    from tfdist_ext.tables.table_config import FeatureConfig
    from tfdist_ext.tables.table_config import TableConfig
    from tfdist_ext.version import VERSION as __version__

__all__ = [
    "DynamicVocabulary",
    "FeatureConfig",
    "HybridParallelStrategy",
    "Machine",
    "ShardingPlan",
    "TableConfig",
    "TablePlacement",
    "__version__",
    "apply_delta",
    "callbacks",
    "compression",
    "consistency",
    "data",
    "export",
    "export_delta",
    "export_onnx",
    "export_safetensors",
    "launch",
    "layers",
    "load_safetensors",
    "losses",
    "measure_machine",
    "metrics",
    "optimizers",
    "plan",
    "scaled_rate",
]


def __getattr__(name: str) -> Any:
    places = {
        "DynamicVocabulary": "tables.table_config",
        "FeatureConfig": "tables.table_config",
        "HybridParallelStrategy": "strategy.strategy",
        "Machine": "tables.problem",
        "ShardingPlan": "tables.plan",
        "TableConfig": "tables.table_config",
        "TablePlacement": "tables.placement",
        "apply_delta": "saving.deltas",
        "export": "saving.exporting",
        "export_delta": "saving.deltas",
        "export_onnx": "saving.onnx_files",
        "export_safetensors": "saving.safetensors_files",
        "load_safetensors": "saving.safetensors_files",
        "measure_machine": "comm.measuring",
        "plan": "tables.plan",
        "scaled_rate": "optimizers.rules",
    }
    if name == "__version__":
        return importlib.import_module("tfdist_ext.version").VERSION
    if name in places:
        module = importlib.import_module(f"tfdist_ext.{places[name]}")
        return getattr(module, name)
    if name in __all__:
        return importlib.import_module(f"tfdist_ext.{name}")
    raise AttributeError(f"module 'tfdist_ext' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
