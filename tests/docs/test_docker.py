# SPDX-License-Identifier: Apache-2.0
"""The Dockerfile names files and versions of this repository.

It is not built here: that needs a Docker daemon.
"""

import fnmatch
import re

from tests.docs import blocks
from tests.docs import test_commands

DOCKERFILE = (blocks.ROOT / "Dockerfile").read_text().replace("\\\n", " ")
IGNORED = (blocks.ROOT / ".dockerignore").read_text().splitlines()


def test_versions_are_those_of_the_makefile():
    (default,) = re.findall(
        r"^TF_DEFAULT := (\S+)", test_commands.MAKEFILE, re.M
    )
    assert f"tensorflow-cpu=={default} " in DOCKERFILE
    assert f"requirements-tf{default.rpartition('.')[0]}.txt" in DOCKERFILE
    pythons = re.findall(r"^FROM python:(\S+)-slim", DOCKERFILE, re.M)
    assert len(pythons) == 2 and len({*pythons}) == 1
    assert f"Python :: {pythons[0]}" in test_commands.SETTINGS


def test_copied_files_exist():
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.M)
    assert len(lines) == 3
    for name in " ".join(lines).split():
        assert (blocks.ROOT / name).exists(), name


def test_command_runs_an_example_with_its_options():
    (command,) = re.findall(r'^CMD \["tfdist-run", (.+)\]', DOCKERFILE, re.M)
    test_commands.check_launcher(re.findall(r'"([^"]+)"', f"{command}"))


def test_products_of_a_build_are_left_out():
    for name in ("build", "dist", ".venv-2.18.1", "tfdist_ext/_build_info.py"):
        assert any(fnmatch.fnmatch(name, each) for each in IGNORED), name
    library = "tfdist_ext/ops/_tfdist_ops.so"
    assert any(fnmatch.fnmatch(library, each) for each in IGNORED)
