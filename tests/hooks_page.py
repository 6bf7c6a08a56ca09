# SPDX-License-Identifier: Apache-2.0
"""Writes the page that lists what is replaced in TensorFlow and Keras.

Usage: python -m tests.hooks_page
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/hooks.md"
HEAD = """# What is replaced in Keras and TensorFlow

Keras and TensorFlow have no hooks for some of what a strategy needs that
partitions tables. `tfdist_ext` replaces the functions below, and nothing else.
One table lists them all: `tfdist_ext/hooks/`. `tfdist_ext/patching.py` installs
and removes them.

- Importing `tfdist_ext` replaces nothing.
- A function is replaced while something needs it: an open strategy, a layer
  with tables, a callback. Afterwards the original is back: after
  `strategy.close()`, and when the layers and callbacks are gone.
- A call of a replaced function goes through the stages of the table, in order,
  and then to the original. Stages act on objects of a strategy of this package.
- Where another library has replaced a function after this package, its function
  stays; the stages of this package end with what needs them.

Names that begin with an underscore are private. The tests of this package use
them with TensorFlow 2.18, 2.19, 2.20 and 2.21, Keras 3.15 and tf_keras.
`python -m tests.hooks_page` writes this page.
"""


def section() -> str:
    """The part of the page for the Keras in use."""
    from tfdist_ext.hooks import table
    from tfdist_ext.keras_internals import KERAS_3

    # Functions that are replaced for the same reason share a row.
    functions: dict[tuple[str, ...], list[str]] = {}
    for hook in table.table():
        needs = {need.value for each in hook.stages for need in each.needs}
        about = (hook.why, "; ".join(sorted(needs)), hook.upstream)
        functions.setdefault(about, []).append(name_of(hook))
    lines = [
        f"## {'Keras 3' if KERAS_3 else 'tf_keras'}",
        "",
        "| functions | why | while there is | would be replaced by |",
        "|---|---|---|---|",
    ]
    for about, names in functions.items():
        together = ", ".join(dict.fromkeys(names))
        lines.append(f"| {' | '.join((together, *about))} |")
    return "\n".join(lines) + "\n"


def name_of(hook: Any) -> str:
    owner = hook.owner
    if not isinstance(owner, type):
        short = owner.__name__.removeprefix("tensorflow.python.")
        if hook.name == "load_model" and "saving" not in short:
            short = "keras.models"
    else:
        short = owner.__qualname__
    some = " of subclasses" if hook.subclasses is not None else ""
    return f"`{short}.{hook.name}`{some}"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for legacy in "01":
        parts.append(
            subprocess.run(
                [sys.executable, "-m", "tests.hooks_page", "section"],
                env={**os.environ, "TF_USE_LEGACY_KERAS": legacy},
                cwd=ROOT,
                timeout=300,
                check=True,
                text=True,
                stdout=subprocess.PIPE,
            ).stdout
        )
    return "\n".join(parts)


if __name__ == "__main__":
    if sys.argv[1:] == ["section"]:
        print(section(), end="")
    else:
        PAGE.write_text(page())
