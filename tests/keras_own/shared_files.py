# SPDX-License-Identifier: Apache-2.0
"""Files of Keras's tests, which several ranks run as one program.

What the tests write to is a path that all ranks share, as the rule for files
demands: temporary folders have equal names on all ranks. A file is removed by
rank 0 when every rank is done with it.
"""

import contextlib
import itertools
import os
import pathlib
import tempfile
import types
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import tfdist_ext


class Folders:
    """Temporary folders, numbered in the order in which a test asks.

    Args:
        folder: where they are, on all ranks.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._paths = (folder / f"temporary{i}" for i in itertools.count())

    def make(self, *_: Any, **__: Any) -> str:
        """The path of a new folder."""
        path = next(self._paths)
        path.mkdir(exist_ok=True)
        return str(path)

    def named(self, *_: Any, **__: Any) -> Any:
        """Stands for `tempfile.TemporaryDirectory`, but stays."""
        path = self.make()
        opened = contextlib.nullcontext(path)
        opened.name = path  # type: ignore[attr-defined]
        return opened


@contextlib.contextmanager
def of_all_ranks(
    strategy: tfdist_ext.HybridParallelStrategy | None,
    folder: pathlib.Path,
    module: types.ModuleType,
    case: unittest.TestCase,
) -> Iterator[None]:
    """Lets a test write where all ranks do, and work in a folder of its own.

    Args:
        strategy: of the ranks; None for one process.
        folder: of all ranks.
        module: what the test is in.
        case: the test.
    """
    folders = Folders(folder)
    case.get_temp_dir = folders.make  # type: ignore[attr-defined]
    of_tempfile = {
        **vars(tempfile),
        "mkdtemp": folders.make,
        "TemporaryDirectory": folders.named,
    }
    of_os = {**vars(os), "remove": lambda path: _remove(strategy, path)}
    own = folder / f"rank{strategy.rank if strategy else 0}"
    own.mkdir()
    before = os.getcwd()
    os.chdir(own)
    try:
        with contextlib.ExitStack() as stack:
            # Some tests name a folder by the id of an object.
            stack.enter_context(
                mock.patch.object(module, "id", lambda _: 0, create=True)
            )
            for name, values in (("os", of_os), ("tempfile", of_tempfile)):
                if hasattr(module, name):
                    stand_in = types.SimpleNamespace(**values)
                    stack.enter_context(
                        mock.patch.object(module, name, stand_in)
                    )
            yield
    finally:
        os.chdir(before)


def _remove(
    strategy: tfdist_ext.HybridParallelStrategy | None, path: str
) -> None:
    _meet(strategy)
    if strategy is None or strategy.rank == 0:
        os.remove(path)
    _meet(strategy)


def _meet(strategy: tfdist_ext.HybridParallelStrategy | None) -> None:
    if strategy is not None and strategy.collectives is not None:
        strategy.collectives.barrier("files of a test")
