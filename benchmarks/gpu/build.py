# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels with nvcc to a library that needs nothing but CUDA."""

from __future__ import annotations

import concurrent.futures
import pathlib
import shutil
import subprocess

from build_ops.toolchain import CUDA_FLAGS

ROOT = pathlib.Path(__file__).resolve().parents[2]

FUNCTORS = [
    "custom_ops/common/half_floats.cc",
    "custom_ops/codec/id_section_reader.cc",
    "custom_ops/codec/id_section_writer.cc",
    "custom_ops/lookup/lookup_functor.cc",
    "custom_ops/lookup/lookup_grad_functor.cc",
    "custom_ops/codec/round_functor.cc",
    "custom_ops/optimizer/row_update_functor.cc",
    "benchmarks/gpu/entry_points.cc",
]


def kernels() -> list[str]:
    """Finds the CUDA sources, as paths from the root."""
    found = sorted((ROOT / "custom_ops").rglob("*.cu.cc"))
    return [str(path.relative_to(ROOT)) for path in found]


def nvcc() -> str | None:
    """Finds the compiler on PATH or where CUDA installs it."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def build(folder: pathlib.Path, jobs: int = 2) -> pathlib.Path:
    """Compiles everything and links it.

    Args:
        folder: where objects and the library go.
        jobs: compilations that run at once.

    Returns:
        The library.

    Raises:
        RuntimeError: there is no nvcc, or a source does not compile.
    """
    compiler = nvcc()
    if compiler is None:
        raise RuntimeError(
            "nvcc is not found. Install the CUDA toolkit, or put it on PATH."
        )
    folder.mkdir(parents=True, exist_ok=True)
    common = [compiler, "-std=c++17", "-O3", f"-I{ROOT}", "-Xcompiler"]
    host = [*common, "-fPIC,-fno-math-errno"]
    cuda = [*common, "-fPIC", *CUDA_FLAGS, "--expt-relaxed-constexpr"]
    commands = {}
    for source in kernels() + FUNCTORS:
        output = folder / (source.replace("/", "_") + ".o")
        how = [*cuda, "-x", "cu"] if source in kernels() else host
        commands[output] = [*how, "-c", str(ROOT / source), "-o", str(output)]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, commands.values()))
    library = folder / "kernels.so"
    objects = [str(path) for path in commands]
    run([compiler, "-shared", "-cudart=static", *objects, "-o", str(library)])
    return library


def run(command: list[str]) -> None:
    """Runs a compiler; what it says is the error's text."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
