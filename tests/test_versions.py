# SPDX-License-Identifier: Apache-2.0
"""What `make test` runs, and with another TensorFlow than the default one."""

import os
import subprocess

import pytest

from tests import tiers
from tests.numbers import registry
from tests.source_files import ROOT

TESTS = ROOT / "tests"


def test_files_and_folders_exist():
    names = (*tiers.VERSION_TESTS, *tiers.LEFT_OUT, *tiers.SLOW)
    missing = [name for name in names if not (TESTS / name).exists()]
    assert not missing


def test_tests_that_are_left_out_exist(monkeypatch, request):
    path = str(request.node.path.relative_to(TESTS))
    monkeypatch.setattr(tiers, "LEFT_OUT", {path: ("left_out_exist",)})
    tiers.check([request.node])
    monkeypatch.setattr(tiers, "LEFT_OUT", {path: ("of no test",)})
    with pytest.raises(pytest.UsageError, match="has 'of no test'"):
        tiers.check([request.node])


def test_scenarios_are_tested():
    paths = (TESTS / "process").glob("test_*.py")
    text = "".join(path.read_text() for path in paths)
    for module in tiers.VERSION_SCENARIOS:
        assert f'"{module}"' in text, module
    assert f"def {tiers.VERSION_PROCESS}(" in text


def test_programs_exist():
    names = list(registry.programs())
    for begin in tiers.VERSION_PROGRAMS:
        assert any(name.startswith(begin) for name in names), begin


@pytest.mark.parametrize(
    ("version", "marked"),
    [("2.21.0", "not extended"), ("2.18.1", "versions")],
)
def test_make_chooses_tests_by_version(version, marked):
    done = subprocess.run(
        # Not "build", which waits for any make that builds here.
        ["make", "-n", "-o", "build", f"TF={version}", "test"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "MAKEFLAGS"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"-m '{marked}'" in done.stdout
