# SPDX-License-Identifier: Apache-2.0
"""Runs the documents' Python blocks; on any number of ranks.

Usage: run_blocks.py FOLDER DOCUMENT...

The blocks of a document run in FOLDER, in order, and share their names. What
each printed goes to FOLDER/printed.<rank>.json, by its place. A process has one
strategy: the first that is made serves all documents.
"""

import contextlib
import functools
import io
import json
import os
import pathlib
import re
import sys
import types

import tfdist_ext
from tests.docs import blocks
from tests.docs import given


def main() -> None:
    folder, *documents = sys.argv[1:]
    os.chdir(folder)
    only = functools.cache(tfdist_ext.HybridParallelStrategy)
    tfdist_ext.HybridParallelStrategy = lambda: only()
    printed = {}
    for document in documents:
        printed.update(run(document))
    path = pathlib.Path(folder, f"printed.{only().rank}.json")
    path.write_text(json.dumps(printed))


def run(document: str) -> dict[str, str]:
    """Runs the blocks of a document; what each of them printed.

    Args:
        document: its path in the repository.
    """
    # A module, since AutoGraph asks for that of a function.
    module = sys.modules[document] = types.ModuleType(document)
    module.__file__ = str(blocks.ROOT / document)
    names = vars(module)
    names.update(given.names(document))
    python = blocks.python_of(document)
    printed = {}
    for block in filter(blocks.is_run, python):
        again = re.fullmatch(r"again: (\d+) lines", block.note)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            if again:
                execute(python[0], names, int(again.group(1)))
            execute(block, names)
        printed[block.place] = output.getvalue()
    return printed


def execute(
    block: blocks.Block, names: dict[str, object], count: int | None = None
) -> None:
    """Runs a block, or its first lines; tracebacks name the document's line.

    Args:
        block: of Python.
        names: what it knows, and where its own go.
        count: how many lines; all by default.
    """
    lines = block.text.splitlines(keepends=True)[:count]
    source = "\n" * (block.line - 1) + "".join(lines)
    path = str(blocks.ROOT / block.document)
    exec(compile(source, path, "exec"), names)


if __name__ == "__main__":
    main()
