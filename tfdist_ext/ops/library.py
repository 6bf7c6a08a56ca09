# SPDX-License-Identifier: Apache-2.0
"""The shared library of compiled ops, loaded at its first use.

The import fails if the library is for another TensorFlow.
"""

from __future__ import annotations

import functools
import importlib
import os
import pathlib
from types import ModuleType

import tensorflow as tf

_FOLDER = pathlib.Path(__file__).parent


@functools.cache
def library() -> ModuleType:
    """Loads the library and returns the module of its ops.

    A wheel may have a library for each of several minor versions of TensorFlow;
    the one for the installed version is loaded. The environment variable
    TFDIST_LIBRARY names another file to load, for example a sanitizer build.

    Returns:
        A module with one function per op: `tfdist_all_to_all` and so on.

    Raises:
        ImportError: if the library is missing, or no library was built for the
            installed minor version of TensorFlow.
    """
    path = _path()
    if not path.exists():
        raise ImportError(
            f"The compiled ops of tfdist_ext are missing: no file {path}. "
            "Build them with `make build` in the source tree, or install the "
            "package: `pip install --no-build-isolation .`"
        )
    return tf.load_op_library(str(path))


def _path() -> pathlib.Path:
    override = os.environ.get("TFDIST_LIBRARY")
    if override:
        return pathlib.Path(override)
    return choose(_FOLDER, _built_for(), tf.__version__)


def choose(
    folder: pathlib.Path, built_for: str | None, installed: str
) -> pathlib.Path:
    """Returns the library for a version of TensorFlow.

    Args:
        folder: has `_tfdist_ops.so`, built for one version, or a library for
            each minor version, such as `_tfdist_ops_tf2_21.so`.
        built_for: the TensorFlow version of `_tfdist_ops.so`; None if unknown.
        installed: the TensorFlow version that is running.

    Returns:
        The path of the library. `_tfdist_ops.so` may be missing.

    Raises:
        ImportError: if no library was built for the minor version.
    """
    found = {
        tuple(map(int, path.stem.split("tf")[-1].split("_"))): path
        for path in folder.glob("_tfdist_ops_tf*.so")
    }
    if not found:
        check_version(built_for, installed)
        return folder / "_tfdist_ops.so"
    major, minor = map(int, installed.split(".")[:2])
    if (major, minor) in found:
        return found[major, minor]
    known = [".".join(map(str, version)) for version in sorted(found)]
    raise ImportError(
        f"TensorFlow {installed} is installed, but this tfdist_ext has "
        f"compiled ops only for TensorFlow {', '.join(known)} (in {folder}). "
        "Install one of these, for example "
        f"`pip install 'tensorflow~={known[-1]}.0'`, "
        f"or a tfdist_ext for TensorFlow {major}.{minor}: "
        "`pip install -U tfdist_ext`."
    )


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
    return getattr(info, "TENSORFLOW_VERSION", None)


def build_info() -> ModuleType | None:
    """Returns the module that the build wrote; None in an unbuilt tree."""
    try:
        return importlib.import_module("tfdist_ext._build_info")
    except ModuleNotFoundError:
        return None


# An import fails where no op would work, not the first use of one.
_path()
