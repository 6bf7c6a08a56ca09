# SPDX-License-Identifier: Apache-2.0
"""Finds the code blocks of this repository's Markdown documents.

A block is fenced or indented by four columns. Its kind:
  python: fenced as such, or whatever else Python can parse;
  shell: command lines, with `$ ` in front where their output follows;
  text: anything else, such as outputs and figures.
An HTML comment in front of a block is a note on how it is run:
  <!-- not run: REASON -->
"""

import ast
import dataclasses
import pathlib
import re
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
FENCES = {"python": "python", "sh": "shell", "text": "text", "": None}
COMMAND = re.compile(
    r"(\w*\$ |#|make |pip |sudo |tfdist-run |(\.venv/bin/)?python )"
)
NOTE = re.compile(r"<!-- (.*) -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        document: its path in the repository.
        line: of its first line, from 1.
        kind: "python", "shell" or "text".
        text: without fence or indentation.
        note: what the comment in front of it says, or nothing.
    """

    document: str
    line: int
    kind: str
    text: str
    note: str = ""

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"


def documents() -> list[str]:
    """All Markdown files, but those of tools and environments."""
    return sorted(
        str(path.relative_to(ROOT))
        for pattern in ("*.md", "[!.]*/*.md")
        for path in ROOT.glob(pattern)
        if path.parent.name not in ("build", "dist")
    )


def blocks_of(document: str) -> list[Block]:
    """The blocks of a file, in order."""
    return list(find(document, (ROOT / document).read_text()))


def python_of(document: str) -> list[Block]:
    """The Python blocks of a file, in order."""
    return [b for b in blocks_of(document) if b.kind == "python"]


def find(document: str, text: str) -> Iterator[Block]:
    """The blocks of a text.

    Args:
        document: name of the text.
        text: Markdown.

    Raises:
        ValueError: at a fence without an end, or of an unknown language.
    """
    lines = text.splitlines()
    at, note = 0, ""
    while at < len(lines):
        line = lines[at]
        if line.lstrip().startswith("```"):
            end = _end_of_fence(document, lines, at)
            body = lines[at + 1 : end]
            yield _block(document, at + 2, body, note, line.strip("` "))
            at, note = end + 1, ""
        elif line.startswith("    ") and not (at and lines[at - 1].strip()):
            end = at
            while end < len(lines) and lines[end][:4].strip() == "":
                end += 1
            yield _block(document, at + 1, lines[at:end], note)
            at, note = end, ""
        else:
            found = NOTE.fullmatch(line)
            note = found.group(1) if found else note if not line else ""
            at += 1


def is_run(block: Block) -> bool:
    """False for the few blocks that show what not to do."""
    return not block.note.startswith("not run: ")


def _end_of_fence(document: str, lines: list[str], start: int) -> int:
    for end in range(start + 1, len(lines)):
        if lines[end].strip() == "```":
            return end
    raise ValueError(f"{document}:{start + 1}: this fence has no end")


def _block(
    document: str, line: int, lines: list[str], note: str, language: str = ""
) -> Block:
    if language not in FENCES:
        known = ", ".join(filter(None, FENCES))
        raise ValueError(
            f"{document}:{line}: a fence is of {known}, or of no language. "
            f"Received: {language}"
        )
    depth = min(len(x) - len(x.lstrip()) for x in lines if x.strip())
    text = "\n".join(x[depth:] for x in lines).rstrip() + "\n"
    kind = FENCES[language] or _kind(text)
    return Block(document, line, kind, text, note)


def _kind(text: str) -> str:
    if COMMAND.match(text):
        return "shell"
    return "python" if _parses(text) else "text"


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def looks_like_python(line: str) -> bool:
    """True for imports, assignments and calls that take a whole line."""
    try:
        (statement, *_) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):
        return False
    value = getattr(statement, "value", None)
    return isinstance(
        statement, ast.Import | ast.ImportFrom | ast.Assign
    ) or isinstance(value, ast.Call)
