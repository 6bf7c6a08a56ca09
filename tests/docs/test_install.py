# SPDX-License-Identifier: Apache-2.0
"""The README's install lines, run as they are in a fresh environment.

They load TensorFlow from a package index and compile the library, which takes
minutes: only with TFDIST_TEST_INSTALL=1 (`make test-install`).
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import source_files
from tests.docs import blocks
from tests.docs.test_code_blocks import documented_outputs
from tests.docs.test_code_blocks import like

LIMIT = 3600  # seconds, for the lines and for the example
# System packages are not installed by a test: they must be there.
SUDO = """#!/bin/sh
[ "$1 $2" = "apt-get install" ] || exit 1
shift 2
for name; do command -v "$name" || exit 1; done
"""


def install_block() -> blocks.Block:
    """The shell block under the README's heading "Install"."""
    lines = (blocks.ROOT / "README.md").read_text().splitlines()
    heading = lines.index("## Install") + 1
    return next(
        block
        for block in blocks.blocks_of("README.md")
        if block.kind == "shell" and block.line > heading
    )


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A folder with a copy of the sources; it is removed: it has gigabytes."""
    for path in source_files.tracked():
        copy = tmp_path / "source" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source_files.ROOT / path, copy)
    yield tmp_path
    shutil.rmtree(tmp_path)


def fresh(folder: pathlib.Path) -> dict[str, str]:
    """The variables of a user who has made and entered an environment."""
    subprocess.run(
        [sys.executable, "-m", "venv", str(folder / "venv")], check=True
    )
    commands = folder / "commands"
    commands.mkdir()
    (commands / "sudo").write_text(SUDO)
    (commands / "sudo").chmod(0o755)
    first = f"{folder}/venv/bin:{commands}"
    ours = {"PYTHONPATH", "PYTHONHOME", "TF_CONFIG", "LD_PRELOAD"}
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ours and not name.startswith("TFDIST_")
    }
    return {**kept, "PATH": f"{first}:{os.environ['PATH']}"}


def run(
    command: list[str], where: pathlib.Path, environment: dict[str, str]
) -> str:
    """Runs a command, which must succeed; what it printed."""
    done = subprocess.run(
        command,
        cwd=where,
        env=environment,
        timeout=LIMIT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.skipif(
    os.environ.get("TFDIST_TEST_INSTALL", "0") == "0",
    reason="takes minutes: make test-install",
)
def test_install_lines_work_in_a_fresh_environment(folder):
    environment = fresh(folder)
    shell = ["bash", "-e", "-c", install_block().text]
    print(run(shell, folder / "source", environment)[-2000:])
    example = blocks.python_of("README.md")[0]
    (folder / "train.py").write_text(example.text)
    said = run(["tfdist-run", "-n", "2", "train.py"], folder, environment)
    for place, rank, text in documented_outputs("README.md", 2):
        if place == example.place:
            lines = of_rank(rank, said)
            assert any(like(text, line) for line in lines), (text, said)


def of_rank(rank: int, said: str) -> list[str]:
    """The lines of a rank, of which only those of rank 0 have no number."""
    found = re.findall(r"^(?:\[(\d+)\] )?(.*)$", said, re.MULTILINE)
    return [text for number, text in found if int(number or 0) == rank]


def test_install_block_is_found():
    lines = install_block().text.splitlines()
    assert lines[0].startswith("sudo apt-get install")
    assert lines[-1].startswith("pip install")


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("apt-get install sh", 0),
        ("apt-get install no-such-program", 1),
        ("rm -r /", 1),
    ],
)
def test_system_packages_are_only_looked_for(command, status, tmp_path):
    (tmp_path / "sudo").write_text(SUDO)
    done = subprocess.run(["sh", str(tmp_path / "sudo"), *command.split()])
    assert done.returncode == status
