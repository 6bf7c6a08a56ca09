# SPDX-License-Identifier: Apache-2.0
"""A scenario: one of Keras's own tests, inside of the strategy's scope.

Keras is installed with its tests. Every rank runs the test as it is; it does
not know that there are others. Its temporary folders are those of all ranks, as
the folders of a program are, its working folder is this rank's own.
"""

import contextlib
import functools
import importlib
import importlib.util
import pathlib
import re
import sys
import types
import unittest
from collections.abc import Callable
from unittest import mock

import pytest

import tfdist_ext
from tests.keras_own import shared_files

# Packages that some tests are about; nothing here needs them.
OPTIONAL = ("grain", "jax", "orbax", "pandas", "requests", "scipy", "torch")
PASSED = "passed"


def load(module: str) -> types.ModuleType:
    """A module of Keras's tests.

    Args:
        module: its name in `keras.src`.

    Raises:
        ModuleNotFoundError: this Keras has no such file.
    """
    # Keras's own, which pytest would find; here it would be one of ours.
    conftest = types.ModuleType("conftest")
    vars(conftest)["skip_if_backend"] = lambda *_: lambda test: test
    stand_ins = {"conftest": conftest}
    if not _is_installed("jax"):  # Imported whatever the backend.
        stand_ins["jax"] = types.ModuleType("jax")
    before = {name: sys.modules.pop(name, None) for name in stand_ins}
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(f"keras.src.{module}")
    finally:
        for name, value in before.items():
            del sys.modules[name]
            if value is not None:
                sys.modules[name] = value


def cases(module: types.ModuleType) -> dict[str, type[unittest.TestCase]]:
    """The tests of a module, "Class.method", and their classes."""
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, unittest.TestCase)
        and kind.__module__ == module.__name__
    ]
    loader = unittest.TestLoader()
    return {
        f"{kind.__name__}.{method}": kind
        for kind in kinds
        for method in loader.getTestCaseNames(kind)
        # Of TensorFlow's class of tests; it starts a session.
        if method != "test_session"
    }


def skipped(kind: type[unittest.TestCase], method: str) -> str:
    """Why pytest would skip a test, if so."""
    function = getattr(kind, method)
    for mark in getattr(function, "pytestmark", ()):
        if mark.name == "skipif" and mark.args[0]:
            return mark.kwargs["reason"]
    return ""


def run(
    strategy: tfdist_ext.HybridParallelStrategy | None,
    folder: pathlib.Path,
    module: str,
    test: str,
) -> str:
    """Runs a test; whether it passed, or why it was skipped.

    Args:
        strategy: whose scope it is; None for no strategy.
        folder: of all ranks.
        module: the file, see `load`.
        test: its name, see `cases`.

    Raises:
        AssertionError: what the test raised, as text.
    """
    loaded = load(module)
    test_utils = importlib.import_module("keras.src.testing.test_utils")
    kind, method = cases(loaded)[test], test.split(".")[1]
    if reason := skipped(kind, method):
        return f"skipped: {reason}"
    case, result = kind(method), unittest.TestResult()
    setattr(case, method, _with_skips(getattr(case, method)))
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with (
        shared_files.of_all_ranks(strategy, folder, loaded, case),
        # It would clear what scope is open; the rank has done it before.
        mock.patch("keras.src.testing.test_case.clear_session"),
        mock.patch.object(
            test_utils,
            "get_test_data",
            functools.partial(test_utils.get_test_data, random_seed=1337),
        ),
        scope,
    ):
        case.run(result)
    problems = [text for _, text in (*result.errors, *result.failures)]
    if problems or not result.wasSuccessful():
        raise AssertionError("\n".join(problems) or "it passed unexpectedly")
    if result.skipped:
        return f"skipped: {result.skipped[0][1]}"
    return PASSED


def _with_skips(method: Callable[[], None]) -> Callable[[], None]:
    """A test that is skipped as pytest skips, and without its package."""

    def run() -> None:
        try:
            method()
        except pytest.skip.Exception as reason:
            raise unittest.SkipTest(str(reason)) from None
        except ImportError as error:
            names = [n for n in OPTIONAL if re.search(rf"\b{n}\b", str(error))]
            if not names or _is_installed(names[0]):
                raise
            raise unittest.SkipTest(f"needs {names[0]}") from None

    return run


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None
