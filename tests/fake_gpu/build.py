# SPDX-License-Identifier: Apache-2.0
"""Builds the stand-ins for CUDA and NCCL, and the ops that use them."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Sequence

import tensorflow as tf

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARY = "tfdist_ext/ops/_tfdist_ops.so"
SOURCES = ("emulated_ops.cc", "fake_cuda.cc", "fake_nccl.cc")


def build(
    folder: pathlib.Path, library: pathlib.Path, flags: Sequence[str] = ()
) -> pathlib.Path:
    """Compiles them, unless that was done before.

    Without optimisation: most of the time goes to TensorFlow's headers.

    Args:
        folder: where the result goes.
        library: the ops of the package, in whose groups the kernels run.
        flags: more, for example of a sanitizer.

    Returns:
        A library of ops, which is NCCL's library too.
    """
    built = folder / "emulated_ops.so"
    if built.exists():
        return built
    theirs = [
        flag.replace("-I", "-isystem", 1)
        for flag in tf.sysconfig.get_compile_flags()
    ]
    command = ["g++", "-std=c++17", "-O0", "-fPIC", "-shared", *flags, *theirs]
    command += [f"-I{ROOT}", f"-I{HERE}", "-Wno-deprecated-declarations"]
    command += ["-DTFDIST_CUDA=1", "-DTFDIST_EMULATED=1", "-DNDEBUG"]
    # TensorFlow has functions of CUDA's names, which ask its own libraries.
    command += ["-Wl,-Bsymbolic"]
    command += [str(HERE / source) for source in SOURCES]
    command += [str(library.resolve()), *tf.sysconfig.get_link_flags()]
    subprocess.run([*command, "-ldl", "-o", str(built)], check=True)
    return built
