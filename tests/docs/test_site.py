# SPDX-License-Identifier: Apache-2.0
"""The site is built without a warning and shows what users may import."""

import importlib
import inspect
import os
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

from benchmarks import summary
from tests.docs import blocks
from tests.packages import PUBLIC
from tfdist_ext.launch import launch_options

README = (blocks.ROOT / "README.md").read_text()
BENCHMARKS = (blocks.ROOT / "docs" / "benchmarks.md").read_text()
(RECORD,) = (blocks.ROOT / "docs" / "benchmarks").glob("all_*.txt")
PAINS = (blocks.ROOT / "docs" / "known_pains.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "-q", "build", "--strict"]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        cwd=blocks.ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_what_the_reference_page_names_is_rendered(site):
    page = (site / "reference.html").read_text()
    for name in shown():
        assert f'id="{name}"' in page, name


def test_changelog_of_the_root_is_a_page(site):
    page = (site / "changelog.html").read_text()
    assert 'href="cluster.html#who-may-join"' in page
    assert 'href="changelog.html"' in (site / "index.html").read_text()


def test_public_names_are_on_the_reference_page():
    """By one of their names: some are public in two places."""
    entries = {
        name
        for name in shown()
        if inspect.isclass(pkgutil.resolve_name(name.rpartition(".")[0]))
        is False
    }
    public = {
        f"{module}.{name}"
        for module in PUBLIC
        for name in importlib.import_module(module).__all__
    }
    assert entries <= public, "Show names as users import them"
    found = [pkgutil.resolve_name(name) for name in shown()]
    for module in map(importlib.import_module, PUBLIC):
        for name in module.__all__:
            public = getattr(module, name)
            if callable(public):
                assert any(public is each for each in found), (
                    f"Show {module.__name__}.{name} in docs/reference.md"
                )


def test_options_of_the_launcher_are_on_the_reference_page(capsys):
    with pytest.raises(SystemExit):
        launch_options.parse(["--help"])
    helped = capsys.readouterr().out
    options = set(re.findall(r"^  +(?:-\w, )?(-[\w-]+)", helped, re.M))
    text = (blocks.ROOT / "docs" / "reference.md").read_text()
    assert len(options) > 8
    for option in options - {"--help"}:
        assert re.search(rf"^\|.*`{option}[ `].*\|", text, re.M), option


def test_packages_are_on_the_page_for_contributors():
    text = (blocks.ROOT / "docs" / "contributing.md").read_text()
    of_python = text.partition("| package |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)/` \|", of_python, re.M)
    package = blocks.ROOT / "tfdist_ext"
    packages = [path.parent.name for path in package.glob("*/__init__.py")]
    assert sorted(listed) == sorted(packages)


def test_readme_is_short():
    assert len(README.splitlines()) <= 150


def rounded_like(written: str, exact: str) -> bool:
    """Whether a number is another one, rounded to its own digits."""
    places = len(written.partition(".")[2])
    return abs(float(written) - float(exact)) <= 0.5000001 * 10**-places


def test_figures_of_the_readme_are_those_of_the_benchmarks():
    """Of `timelines` on 4 ranks: what "Why" and "Known pains" quote."""
    _, _, group = RECORD.read_text().partition("timelines, 4 ranks")
    measured = re.findall(r"(?<= )\d+\.\d+", group.partition("\n\n")[0])
    _, _, why = README.partition("## Why")
    text = why.partition("\n## ")[0] + PAINS
    quoted = re.findall(r"([\d.]+) (?:ms|MB)\b(?!/)", text)
    quoted = [number for number in quoted if number != "150"]  # the link's
    assert len(quoted) == 7
    for number in quoted:
        assert any(rounded_like(number, each) for each in measured), number


def test_every_workload_of_the_record_has_its_chart():
    groups = summary.read(RECORD.read_text())
    assert len(groups) == 13
    names = {group.workload for group in groups}
    charts = set(re.findall(r"\]\(benchmarks/(\w+)\.svg\)", BENCHMARKS))
    assert charts == names | {"headline"}
    assert charts == {path.stem for path in RECORD.parent.glob("*.svg")}


def test_figures_of_the_headline_are_those_of_the_record():
    """The text that stands for the chart quotes it."""
    text = BENCHMARKS.partition("![")[2].partition("](")[0]
    measured = re.findall(r"(?<= )\d+\.\d+", RECORD.read_text())
    quoted = re.findall(r"\d+\.\d+|\b\d{3}\b", text)
    assert len(quoted) == 16
    for number in quoted:
        assert any(rounded_like(number, each) for each in measured), number


@pytest.mark.parametrize(
    ("written", "exact", "same"),
    [("527", "526.60", True), ("0.506", "0.506", True), ("25", "25.94", False)],
)
def test_rounding(written, exact, same):
    assert rounded_like(written, exact) == same


def shown() -> list[str]:
    """What the reference page shows: classes, functions, their members."""
    found = []
    text = (blocks.ROOT / "docs" / "reference.md").read_text()
    for entry in re.finditer(r"^::: (\S+)\n((?: {4}.*\n)*)", text, re.M):
        _, _, members = entry.group(2).partition("members: [")
        names = re.findall(r"\w+", members.partition("]")[0])
        found += [entry.group(1), *(f"{entry.group(1)}.{n}" for n in names)]
    return found


@pytest.mark.parametrize("name", shown())
def test_what_is_shown_describes_its_arguments(name):
    subject = pkgutil.resolve_name(name)
    text = inspect.getdoc(subject)
    assert text, "a doc-string"
    if not callable(subject):
        return
    parameters = set(inspect.signature(subject).parameters) - {"args", "kwargs"}
    if inspect.isclass(subject) or len(parameters - {"self"}) > 1:
        for parameter in parameters - {"self"}:
            assert re.search(rf"^    {parameter}: ", text, re.M), parameter
