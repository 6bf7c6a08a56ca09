# SPDX-License-Identifier: Apache-2.0
"""Every Python block of the documents runs, and prints what they say."""

import re
from collections import defaultdict

import pytest

from tests.docs import blocks

# Blocks that are shown as wrong, or need servers, by document: how many.
NOT_RUN = {
    "docs/checkpoints.md": 1,
    "docs/differences.md": 1,
    "docs/launchers.md": 3,
    "docs/migrating.md": 1,
    "docs/monitoring.md": 1,
    "docs/serving.md": 3,
    "docs/streams.md": 1,
}
TIME = re.compile(r"\b\d+(s|[mu]?s/step)$")
# Of losses, which sums in another order may change.
TOLERANCE = 1e-3
WITH_CODE = [
    name
    for name in blocks.documents()
    if any(map(blocks.is_run, blocks.python_of(name)))
]
ALL = [b for name in blocks.documents() for b in blocks.blocks_of(name)]


def like(expected: str, line: str) -> bool:
    """True if a line says what the document's line says.

    Times may be others, numbers with a point a little, and "[...]" stands for
    anything.
    """
    tail = expected.endswith("[...]")
    words, found = expected.removesuffix("[...]").split(), line.split()
    if len(words) > len(found) or (len(words) < len(found) and not tail):
        return False
    return all(map(like_word, words, found))


def like_word(expected: str, word: str) -> bool:
    if TIME.match(expected):
        return bool(TIME.match(word))
    if re.fullmatch(r"\d+\.\d+", expected):
        try:
            return float(word) == pytest.approx(float(expected), abs=TOLERANCE)
        except ValueError:
            return False
    return expected == word


def documented_outputs(document: str, ranks: int) -> list[tuple[str, int, str]]:
    """Lines that follow `$ ` commands: their block, rank and text."""
    found, program = [], ""
    for block in blocks.blocks_of(document):
        if block.kind == "python":
            program = block.place
        elif block.kind == "shell" and "$ " in block.text:
            said = outputs(block.text).get(ranks, [])
            found += [(program, rank, text) for rank, text in said]
    return found


def outputs(text: str) -> dict[int, list[tuple[int, str]]]:
    """By number of ranks, the lines of every rank.

    Args:
        text: of a shell block; a line with `$ ` says how many ranks ran.
    """
    found: dict[int, list[tuple[int, str]]] = {}
    ranks = 1
    for line in text.splitlines():
        command = re.match(r"\w*\$ (?:tfdist-run -n (\d))?", line)
        if command:
            ranks = int(command.group(1) or 1)
        else:
            rank, said = re.fullmatch(r"(?:\[(\d+)\] )?(.*)", line).groups()
            found.setdefault(ranks, []).append((int(rank or 0), said))
    return found


@pytest.mark.process
@pytest.mark.parametrize(
    ("ranks", "keras", "document"),
    [(ranks, 3, name) for ranks in (1, 2) for name in WITH_CODE]
    + [(2, 2, "README.md")],
)
def test_blocks_run_and_print_what_documents_say(
    run_scenario, ranks, keras, document
):
    scenario = "tests.docs.run_blocks.run"
    printed = run_scenario(scenario, document, ranks=ranks, keras=keras)
    python = filter(blocks.is_run, blocks.python_of(document))
    places = [block.place for block in python]
    assert all(list(texts) == places for texts in printed)
    for place, rank, text in documented_outputs(document, ranks):
        lines = printed[rank][place].splitlines()
        # That of the other Keras has another form.
        assert keras == 2 or any(like(text, line) for line in lines), (
            f"{place} says: {text}\nrank {rank} printed:\n" + "\n".join(lines)
        )


def test_documents_say_what_is_printed():
    for ranks in (1, 2):
        assert any(documented_outputs(d, ranks) for d in WITH_CODE)


@pytest.mark.parametrize(
    ("said", "printed", "same"),
    [
        (
            "9/9 - 3s - 3ms/step - loss: 0.5",
            "9/9 - 1s - 9us/step - loss: 0.5",
            1,
        ),
        ("loss: 0.5211", "loss: 0.5216", True),
        ("loss: 0.5211", "loss: 0.5311", False),
        ("holds (10, 32)", "holds (10, 64)", False),
        ("a 1 [...]", "a 1 b c", True),
        ("a 1", "a 1 b", False),
        ("a 1 b [...]", "a 1", False),
    ],
)
def test_outputs_are_compared(said, printed, same):
    assert like(said, printed) == same


def test_outputs_are_read():
    text = "$ python a.py\nx\n$ tfdist-run -n 2 a.py\ny\n[1] z\n"
    assert outputs(text) == {1: [(0, "x")], 2: [(0, "y"), (1, "z")]}


def test_blocks_are_found():
    """Fenced and indented, in lists too; what is not code is not."""
    text = """
Words.

```python
x = 1

y = 2
```

    # a comment
    make demo

<!-- not run: as an example -->

    if wrong:
        pass

Words.

    r0 | all_reduce 'reduce'

- item

  ```sh
  make
  ```
"""
    found = list(blocks.find("a.md", text))
    assert [(b.line, b.kind) for b in found] == [
        (5, "python"),
        (10, "shell"),
        (15, "python"),
        (20, "text"),
        (25, "shell"),
    ]
    assert [blocks.is_run(b) for b in found] == [True, True, False, True, True]


@pytest.mark.parametrize("fence", ["```py\nx\n```", "```python\nx = 1"])
def test_unclear_fences_are_refused(fence):
    with pytest.raises(ValueError, match=r"a\.md:"):
        list(blocks.find("a.md", fence))


def test_no_python_hides_in_other_blocks():
    """A block that Python cannot parse must not look like its code."""
    hidden = [
        f"{b.place}: {line}"
        for b in ALL
        if b.kind != "python"
        for line in b.text.splitlines()
        if blocks.looks_like_python(line)
    ]
    assert not hidden, "Fence Python as ```python, and let it run"


def test_blocks_that_are_not_run_can_be_compiled():
    for block in ALL:
        if block.kind == "python" and not blocks.is_run(block):
            compile(block.text, block.place, "exec")


def test_few_blocks_are_not_run_and_say_why():
    counts = defaultdict(int)
    for block in ALL:
        if not blocks.is_run(block):
            counts[block.document] += 1
            assert len(block.note.split()) > 3, f"{block.place}: give a reason"
    assert dict(counts) == NOT_RUN, "Show code that runs, or list it here"
