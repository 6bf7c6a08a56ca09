# SPDX-License-Identifier: Apache-2.0
"""A scenario: the Python blocks of a document, on any number of ranks.

The blocks run in the test's folder, in order, and share their names. A process
has one strategy: blocks that make one get that of the pool.
"""

import contextlib
import io
import os
import pathlib
import sys
import types
from unittest import mock

import tfdist_ext
from tests.docs import blocks
from tests.docs import given


def run(
    strategy: tfdist_ext.HybridParallelStrategy,
    folder: pathlib.Path,
    document: str,
) -> dict[str, str]:
    """Runs the blocks of a document; what each of them printed, by its place.

    Args:
        strategy: what is made whenever a strategy is.
        folder: where they run.
        document: its path in the repository.
    """
    before = pathlib.Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.object(
            tfdist_ext, "HybridParallelStrategy", lambda **_: strategy
        ):
            return run_document(document)
    finally:
        os.chdir(before)


def run_document(document: str) -> dict[str, str]:
    """Runs the blocks of a document here.

    Args:
        document: its path in the repository.
    """
    # A module, since AutoGraph asks for that of a function.
    module = sys.modules[document] = types.ModuleType(document)
    module.__file__ = str(blocks.ROOT / document)
    names = vars(module)
    names.update(given.names(document))
    printed = {}
    for block in filter(blocks.is_run, blocks.python_of(document)):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            execute(block, names)
        printed[block.place] = output.getvalue()
    return printed


def execute(block: blocks.Block, names: dict[str, object]) -> None:
    """Runs a block; tracebacks name the document's line.

    Args:
        block: of Python.
        names: what it knows, and where its own go.
    """
    source = "\n" * (block.line - 1) + block.text
    path = str(blocks.ROOT / block.document)
    exec(compile(source, path, "exec"), names)
