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

    The environment variable TFDIST_LIBRARY names another file to load, such
    as a sanitizer build.

    Returns:
        A module with one function per op: `tfdist_all_to_all` and so on.

    Raises:
        ImportError: the library is missing, or was built for another minor
            version of TensorFlow, with which it cannot work.
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
    """Compares minor versions; C++ ops are bound to theirs.

    Args:
        built_for: version the library was built with; None skips the check.
        installed: version that is running.

    Raises:
        ImportError: the minor versions differ.
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
    """Whether ops can be where a table is on a GPU.

    Returns:
        True for a library that was built with CUDA; False for any that
        TFDIST_LIBRARY names, which sanitizer builds are not.
    """
    if os.environ.get("TFDIST_LIBRARY"):
        return False
    return bool(getattr(build_info(), "CUDA", False))


def _built_for() -> str | None:
    info = build_info()
    return None if info is None else str(info.TENSORFLOW_VERSION)


def build_info() -> Any:
    """The module that the build wrote, None in a tree that was not built."""
    try:
        return importlib.import_module("tfdist_ext._build_info")
    except ModuleNotFoundError:
        return None
