# SPDX-License-Identifier: Apache-2.0
"""Writes the page that lists all programs and their verdicts.

Usage: python -m tests.numbers.table
"""

from __future__ import annotations

import collections
import pathlib

from tests.numbers import registry

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs/numbers_table.md"
_HEAD = """# Programs and their verdicts

Each of these {count} programs runs in one process of stock Keras and on several
ranks, with partitioned tables and without them, on batches that ranks share
equally and on those that they do not. All losses, logs, predictions, weights
and tables are compared. A program has one of three verdicts:

| verdict | meaning | programs |
|---|---|---|
| equal | All numbers are those of one process | {equal} |
| warned | A number may differ; a warning names what it comes from | {warned} |
| refused | The program ends with an error that says what to do | {refused} |

No program is silently different. `python -m tests.numbers.table` writes this
page; `make test-numbers` runs every program in every setting;
`python -m tests.numbers.run --ranks 2 --only PATTERN` shows the largest error
of each.
"""


def page() -> str:
    """The text of the page."""
    found = registry.programs()
    counts = collections.Counter(each.verdict for each in found.values())
    verdicts = {verdict: counts[verdict] for verdict in registry.VERDICTS}
    parts = [_HEAD.format(count=len(found), **verdicts)]
    group = ""
    for each in found.values():
        if each.group != group:
            group = each.group
            parts.append(_heading(group))
        parts.append(_row(each))
    return "\n".join(parts) + "\n"


def _heading(group: str) -> str:
    title = group.replace("_", " ").capitalize()
    columns = "| program | what it does | Keras | verdict |"
    return f"\n## {title}\n\n{columns}\n|---|---|---|---|"


def _row(each: registry.Program) -> str:
    name = each.name.partition("/")[2]
    kerases = {(3, 2): "both", (3,): "3", (2,): "tf_keras"}[each.kerases]
    about = each.about.replace("|", "\\|").rstrip(".")
    return f"| {name} | {about} | {kerases} | {each.verdict} |"


if __name__ == "__main__":
    PAGE.write_text(page())
