# SPDX-License-Identifier: Apache-2.0
"""The files that a hosting platform reads: workflows, forms, citation."""

import re
import shlex

import pytest

from tests.docs import blocks
from tests.docs import test_commands
from tfdist_ext.version import VERSION

yaml = pytest.importorskip("yaml")  # mkdocs needs it too

PLATFORM = blocks.ROOT / ".github"
WORKFLOWS = sorted((PLATFORM / "workflows").glob("*.yml"))
FORMS = sorted((PLATFORM / "ISSUE_TEMPLATE").glob("[!c]*.yml"))


def jobs() -> list[dict]:
    """Every job of every workflow."""
    return [
        job
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
    ]


def steps() -> list[dict]:
    """Every step of every job."""
    return [step for job in jobs() for step in job["steps"]]


def check_run(text: str) -> None:
    """Command lines are `make` with targets and variables that exist."""
    for line in text.splitlines():
        program, *words = shlex.split(re.sub(r"\$\{\{.*?\}\}", "x", line))
        assert program == "make", f"Use what developers use: {line}"
        test_commands.check_make(words)


def test_workflows_run_make_targets_that_exist():
    assert {path.stem for path in WORKFLOWS} == {"lint", "test", "wheels"}
    runs = [step["run"] for step in steps() if "run" in step]
    for text in runs:
        check_run(text)
    for target in ("lint", "docs", "demo", "test", "test-all", "wheels"):
        assert any(text.split()[1] == target for text in runs), target


@pytest.mark.parametrize(
    "text", ["make no_such_target", "make test NO=1", "pytest", "make lint\nls"]
)
def test_wrong_steps_are_found(text):
    with pytest.raises(AssertionError):
        check_run(text)


def test_actions_are_pinned_to_a_major_version_and_jobs_have_limits():
    for step in steps():
        assert re.fullmatch(
            r"actions/[\w-]+@v\d+", step.get("uses", "actions/x@v1")
        )
    assert all(0 < job["timeout-minutes"] <= 360 for job in jobs())


def matrices(workflow: str) -> list[dict]:
    """The matrix of every job of a workflow."""
    text = (PLATFORM / "workflows" / f"{workflow}.yml").read_text()
    return [
        job["strategy"]["matrix"]
        for job in yaml.safe_load(text)["jobs"].values()
    ]


def test_matrix_has_every_supported_version():
    found = matrices("test")
    tested = [each for matrix in found for each in matrix["tensorflow"]]
    pins = blocks.ROOT.glob("requirements-tf*.txt")
    minors = [path.stem.removeprefix("requirements-tf") for path in pins]
    assert sorted(v.rpartition(".")[0] for v in tested) == sorted(minors)
    (default,) = re.findall(
        r"^TF_DEFAULT := (\S+)", test_commands.MAKEFILE, re.M
    )
    assert default in found[0]["tensorflow"]
    classifier = r'"Programming Language :: Python :: (3\.\d+)"'
    supported = re.findall(classifier, test_commands.SETTINGS)
    pythons = [matrix.get("python") for matrix in found]
    assert pythons == [supported, None]


def test_forms_have_what_the_platform_asks_for():
    assert {path.stem for path in FORMS} == {"bug", "feature", "question"}
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= set(form), path
        for field in form["body"]:
            assert field["type"] in ("markdown", "textarea", "input"), path
            assert (
                field["attributes"].get("label")
                or "value" in (field["attributes"])
            ), path
    config = PLATFORM / "ISSUE_TEMPLATE" / "config.yml"
    assert yaml.safe_load(config.read_text()) == {"blank_issues_enabled": False}


def test_version_is_the_same_everywhere():
    citation = yaml.safe_load((blocks.ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    changes = (blocks.ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## (\S+)", changes, re.M)[0] == VERSION
    policy = (blocks.ROOT / "SECURITY.md").read_text()
    assert f"now {VERSION.rpartition('.')[0]}." in policy
    bug = (PLATFORM / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    assert f"tfdist_ext {VERSION}," in bug
