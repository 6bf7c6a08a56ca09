# SPDX-License-Identifier: Apache-2.0
"""Groups whose GPUs are stand-ins, and functions that run on these."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.comm import gpus
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import library

GPU_OPS = ("AllToAll", "AllGather", "AllReduce", "Broadcast")
LABELS = {f"Tfdist>{name}": "emulated" for name in GPU_OPS}


def load(path: pathlib.Path) -> types.SimpleNamespace:
    """Loads the library of `build`; its ops have the names of a CUDA build.

    Its other ops are those of the package's library.
    """
    own = library.library()  # first: the other one needs it
    ops = tf.load_op_library(str(path))
    names = [name for name in dir(own) if name.startswith("tfdist_")]
    found = {name: getattr(own, name) for name in names}
    found["tfdist_gpu_offer"] = ops.tfdist_emulated_gpu_offer
    found["tfdist_group_gpus"] = ops.tfdist_emulated_group_gpus
    return types.SimpleNamespace(**found)


def connect(
    group: ProcessGroup, nccl: str | pathlib.Path, device: int | None = -1
) -> str:
    """Gives a group its ranks' GPUs, see `tables_of`; says who carries."""
    return _connected(group, nccl, device)[0]


def tables_of(
    group: ProcessGroup, nccl: str | pathlib.Path, device: int | None = -1
) -> gpus.TableGpus:
    """What tables may have of the ranks' GPUs, once they are connected.

    Args:
        group: the ranks.
        nccl: see `_connected`.
        device: of this rank, instead.
    """
    return _connected(group, nccl, device)[1]


def _connected(
    group: ProcessGroup, nccl: str | pathlib.Path, device: int | None
) -> tuple[str, gpus.TableGpus]:
    """Gives a group its ranks' GPUs, which are numbered as the ranks are.

    Args:
        group: the ranks; `group_ops.library` must return what `load` does.
        nccl: value of `gpus.NCCL_VARIABLE`.
        device: of this rank, instead of its number where that is -1.

    Returns:
        See `gpus.connect`.
    """
    environ = {gpus.NCCL_VARIABLE: str(nccl)}
    device = group.rank if device == -1 else device
    return gpus.connect(group, environ, device)


def on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traces a function of tensors with the kernels for GPUs."""

    @tf.function
    def traced(*arguments: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with graph._kernel_label_map(LABELS):
            return function(*arguments)

    return traced
