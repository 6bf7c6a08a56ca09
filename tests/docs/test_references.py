# SPDX-License-Identifier: Apache-2.0
"""What the documents point to is there: pages, anchors, files, names."""

import importlib
import re
import subprocess

import pytest

from tests.docs import blocks

TEXTS = {name: (blocks.ROOT / name).read_text() for name in blocks.documents()}
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(
    r"(?<![\w/.-])[\w.-]+(?:/[\w.-]+)*\.(?:py|md|cc|h|sh|txt|png)\b"
)
# Files that a program writes, or that stand for the reader's.
NOT_OURS = {
    "train.py",
    "recommend.py",
    "report.png",
    "chart.png",
    "scaling.png",
    "plan.png",
    "table.txt",
}


def anchors(text: str) -> set[str]:
    """Anchors that GitHub gives to headings."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.*)", outside, re.M)
    }


def test_links_lead_somewhere():
    wrong = []
    for name, text in TEXTS.items():
        for link in LINK.findall(text):
            if link.startswith("http"):
                continue
            path, _, anchor = link.partition("#")
            target = (blocks.ROOT / name).parent / path if path else None
            if target and not target.exists():
                wrong.append(f"{name}: no file {link}")
            elif anchor and anchor not in anchors(
                target.read_text() if target else text
            ):
                wrong.append(f"{name}: no heading {link}")
    assert not wrong


def test_every_document_is_reached_from_the_readme():
    seen, left = set(), ["README.md"]
    while left:
        name = left.pop()
        seen.add(name)
        folder = (blocks.ROOT / name).parent
        for link in LINK.findall(TEXTS[name]):
            path = (folder / link.partition("#")[0]).resolve()
            if link.startswith("http") or not link.partition("#")[0]:
                continue
            if path.suffix == ".md":
                found = str(path.relative_to(blocks.ROOT))
                left += [found] if found not in seen else []
    assert seen == set(TEXTS)


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    try:
        return subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=blocks.ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")


def test_files_exist(tracked):
    """Paths in the text, from the root, the package or their own folder."""
    wrong = []
    for name, text in TEXTS.items():
        prose = re.sub(r"\]\([^)]*\)|https?://\S+", "", text)
        for path in set(PATH.findall(prose)) - NOT_OURS:
            if not any(f"/{file}".endswith(f"/{path}") for file in tracked):
                wrong.append(f"{name}: {path}")
    assert not wrong


def test_names_of_the_package_exist():
    for text in TEXTS.values():
        for name in set(re.findall(r"\btfdist_ext(?:\.[A-Za-z_]\w*)+", text)):
            found = importlib.import_module("tfdist_ext")
            for part in name.split(".")[1:]:
                if not hasattr(found, part):
                    importlib.import_module(f"{found.__name__}.{part}")
                found = getattr(found, part)


def test_options_and_variables_exist(tracked):
    """Options of commands and TFDIST_ variables, wherever the text has them."""
    sources = "".join(
        (blocks.ROOT / path).read_text()
        for path in tracked
        if path.endswith((".py", ".cc", ".h", ".sh", "Makefile"))
        and not path.startswith("tests/docs")
    )
    wrong = [
        f"{name}: {word}"
        for name, text in TEXTS.items()
        for word in set(re.findall(r"(?<![\w-])--[a-z][\w-]+|TFDIST_\w+", text))
        if not re.search(rf"(?<![\w-]){word}(?![\w-])", sources)
    ]
    assert not wrong
