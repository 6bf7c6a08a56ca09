# SPDX-License-Identifier: Apache-2.0
"""The shared library of compiled ops, loaded at its first use."""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
from typing import Any

import tensorflow as tf

_LIBRARY = pathlib.Path(__file__).with_name("_tfdist_ops.so")


@functools.cache
def library() -> Any:
    """Loads the library and returns the module of its ops.

    The environment variable TFDIST_LIBRARY names another file to load, for
    example a sanitizer build.

    Returns:
        A module with one function per op: `tfdist_all_to_all` and so on.

    Raises:
        ImportError: if the library is missing, or was built for another minor
            version of TensorFlow and therefore cannot work.
    """
    override = os.environ.get("TFDIST_LIBRARY")
    path = pathlib.Path(override) if override else _LIBRARY
    if not override:
        check_version(_built_for(), tf.__version__)
    if not path.exists():
        raise ImportError(
            f"The compiled ops of tfdist_ext are missing: no file {path}. "
            "Build them with `make build` in the source tree, or install the "
            "package: `pip install --no-build-isolation .`"
        )
    return tf.load_op_library(str(path))


def check_version(built_for: str | None, installed: str) -> None:
    """Checks minor versions, because C++ ops work with only one of them.

    Args:
        built_for: the TensorFlow version that the library was built with; None
            skips the check.
        installed: the TensorFlow version that is running.

    Raises:
        ImportError: if the minor versions differ.
    """
    if built_for is None:
        return
    minor = ".".join(built_for.split(".")[:2])
    if minor == ".".join(installed.split(".")[:2]):
        return
    raise ImportError(
        f"tfdist_ext was built for TensorFlow {minor}, but TensorFlow "
        f"{installed} is installed. Either install the version it was built "
        f"for, `pip install 'tensorflow~={minor}.0'`, or build it for this "
        "one: `pip install --no-build-isolation --force-reinstall --no-deps .` "
        "in the source tree."
    )


def has_gpu_kernels() -> bool:
    """Whether the ops have GPU kernels, for tables on a GPU.

    Returns:
        True if the library was built with CUDA. False for a library that
        TFDIST_LIBRARY names, because sanitizer builds are without CUDA.
    """
    if os.environ.get("TFDIST_LIBRARY"):
        return False
    return bool(getattr(build_info(), "CUDA", False))


def _built_for() -> str | None:
    info = build_info()
    return None if info is None else str(info.TENSORFLOW_VERSION)


def build_info() -> Any:
    """Returns the module that the build wrote; None in an unbuilt tree."""
    try:
        return importlib.import_module("tfdist_ext._build_info")
    except ModuleNotFoundError:
        return None
