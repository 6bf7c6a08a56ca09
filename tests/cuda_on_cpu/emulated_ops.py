# SPDX-License-Identifier: Apache-2.0
"""The ops' kernels for GPUs, compiled for a CPU and chosen by a label."""

from __future__ import annotations

import contextlib
import ctypes
import pathlib
import subprocess
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from benchmarks.gpu.build import kernels
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.translate import translate
from tfdist_ext.ops.library import library

OPS = (
    *("DecodeIds", "Lookup", "LookupGrad", "InitRows", "RoundToWire"),
    "SumDuplicateRows",
    *("Pool", "PoolGrad", "Combine", "CombineGrad", "ResetRows"),
    *("ApplyRowSgd", "ApplyRowMomentum", "ApplyRowAdagrad", "ApplyRowFtrl"),
    *("ApplyRowWiseAdagrad", "ApplyRowAdam", "ClipRows", "ScaleTable"),
)


class EmulatedOps:
    """A library of these kernels, loaded beside that of the ops.

    Args:
        folder: where it is built.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        path = folder / "emulated_ops.so"
        build(folder, path)
        tf.load_library(str(path))
        self._library = ctypes.CDLL(str(path))
        for name in ("Launches", "Waits"):
            getattr(self._library, name).restype = ctypes.c_uint64

    def launches(self) -> int:
        """Counts the kernels that were launched so far."""
        return int(self._library.Launches())

    def waits(self) -> int:
        """Counts how often the host has waited for them."""
        return int(self._library.Waits())

    def wait_together(self, count: int) -> None:
        """None of the next waits ends before there are so many at once."""
        self._library.WaitTogether(ctypes.c_uint64(count))

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Ops of the graph being made have these kernels."""
        graph = tf.compat.v1.get_default_graph()
        with graph._kernel_label_map(
            {f"Tfdist>{op}": "emulated" for op in OPS}
        ):
            yield

    def run(self, function: Callable[[], Any]) -> Any:
        """Runs a function as a graph with these kernels."""

        @tf.function(autograph=False)
        def traced() -> Any:
            with self.chosen():
                return function()

        return traced()


def on_cpu(function: Callable[[], Any]) -> Any:
    """Runs a function as a graph with the kernels for CPUs."""
    return tf.function(function, autograph=False)()


def build(folder: pathlib.Path, path: pathlib.Path) -> None:
    """Compiles the kernels, and what calls them, in one go."""
    library()
    sources = [emulated.HERE / "ops.cc"]
    for name in kernels():
        source = emulated.ROOT / name
        sources.append(folder / f"{source.name}.translated.cc")
        sources[-1].write_text(translate(source.read_text()))
    built = emulated.ROOT / "tfdist_ext" / "ops" / "_tfdist_ops.so"
    flags = [
        "-isystem" + flag[2:] if flag.startswith("-I") else flag
        for flag in tf.sysconfig.get_compile_flags()
    ]
    where = [f"-I{emulated.HERE}", f"-I{emulated.ROOT}"]
    how = ["-std=c++17", "-O0", "-fPIC", "-w"]
    command = ["g++", *flags, *where, *how, "-shared", *map(str, sources)]
    command += [str(built), f"-Wl,-rpath,{built.parent}"]
    command += [*tf.sysconfig.get_link_flags(), "-o", str(path)]
    subprocess.run(command, check=True)
