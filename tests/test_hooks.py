# SPDX-License-Identifier: Apache-2.0
"""What is replaced in Keras and TensorFlow, and that it is restored."""

import ast
import gc
import os
import pathlib
import subprocess
import sys

import pytest

from tests import hooks_page
from tests.source_files import PACKAGE
from tests.source_files import ROOT
from tfdist_ext.patching import Need
from tfdist_ext.patching import extend
from tfdist_ext.patching import hold
from tfdist_ext.patching import release
from tfdist_ext.patching import stage

PROGRAM = pathlib.Path(__file__).with_name("hooks_program.py")
LAUNCH = ["-m", "tfdist_ext.launch", "-n", "2"]


class Holder:
    """What needs a stage."""


class Base:
    def name(self) -> str:
        return "base"


class Own(Base):
    def name(self) -> str:
        return f"own {super().name()}"


def brackets(original, self):
    return f"({original(self)})"


def stars(original, self):
    return f"*{original(self)}*"


def extended(owner, call=brackets):
    """A fresh class whose method has a stage, which a callback needs."""
    cls = type("Fresh", (owner,), dict(vars(owner)) if owner is Base else {})
    extend(cls, "name", stage(call, Need.TIMELINE))
    return cls


@pytest.mark.parametrize("owner", [Base, Own])
def test_a_stage_stands_while_it_is_needed(owner):
    plain = owner().name()
    cls, holder, other = extended(owner), Holder(), Holder()
    before = dict(vars(cls))
    assert cls().name() == plain
    hold(Need.TIMELINE, holder)
    extend(cls, "name", stage(brackets, Need.TIMELINE))
    hold(Need.TIMELINE, other)
    extend(cls, "name", stage(brackets, Need.TIMELINE))  # twice is once
    assert cls().name() == f"({plain})"
    release(holder)
    assert cls().name() == f"({plain})"
    del other
    gc.collect()
    assert cls().name() == plain
    assert dict(vars(cls)) == before


def test_what_others_have_put_around_it_stays():
    holder = Holder()
    hold(Need.TIMELINE, holder)
    cls = extended(Own)
    ours = cls.name
    cls.name = lambda self: stars(ours, self)
    assert cls().name() == "*(own base)*"
    release(holder)
    assert cls().name() == "*own base*"
    hold(Need.TIMELINE, holder)
    extend(cls, "name", stage(brackets, Need.TIMELINE))  # twice is once
    assert cls().name() == "*(own base)*"


def test_what_others_replace_between_two_needs_counts():
    holder = Holder()
    hold(Need.TIMELINE, holder)
    cls = extended(Own)
    ours = cls.name
    release(holder)
    cls.name = lambda self: stars(ours, self)
    hold(Need.TIMELINE, holder)
    extend(cls, "name", stage(brackets, Need.TIMELINE))
    assert cls().name() == "(*own base*)"
    release(holder)
    assert cls().name() == "*own base*"


@pytest.mark.process
@pytest.mark.parametrize("legacy", ["0", "1"])
@pytest.mark.parametrize("what", ["imports", "life", "stages"])
def test_nothing_is_left_in_keras_and_tensorflow(what, legacy):
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": legacy}
    environment.pop("TF_CONFIG", None)
    launch = LAUNCH if what == "life" else []
    subprocess.run(
        [sys.executable, *launch, str(PROGRAM), what],
        env={**environment, "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=True,
    )


@pytest.mark.process
def test_the_page_lists_what_the_table_has():
    assert hooks_page.PAGE.read_text() == hooks_page.page(), (
        "Run `python -m tests.hooks_page`"
    )


def test_one_module_changes_keras_and_tensorflow():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if path.name == "patching.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            for target in targets:
                if isinstance(target, ast.Attribute):
                    root = ast.unparse(target).partition(".")[0]
                    if root in ("tf", "keras", "internals", "names"):
                        wrong.append(f"{path.name}:{node.lineno}")
    assert not wrong, "Put it into the table of hooks.py"
