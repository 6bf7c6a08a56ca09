# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the examples' tests."""

import pathlib
import sys
from collections.abc import Callable

import pytest

from tests.ranks.programs import Programs

REPOSITORY = pathlib.Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
sys.path.insert(0, str(EXAMPLES))

# They ask for it before they import TensorFlow, which a server has done.
WITH_TF_KERAS = ("movielens.py",)
RunExample = Callable[..., str]


@pytest.fixture
def real_data() -> Callable[[str], pathlib.Path]:
    """Finds a folder of real data beside the repository, or skips."""

    def find(name: str) -> pathlib.Path:
        folder = REPOSITORY.parent / "shared" / "data" / name
        if not folder.is_dir():
            pytest.skip(f"real data '{name}' is not on this machine")
        return folder

    return find


@pytest.fixture
def run_example(run_ranks: Programs, tmp_path: pathlib.Path) -> RunExample:
    """Runs an example at a number of ranks and returns what it printed."""

    def run(script: str, *arguments: object, ranks: int = 1) -> str:
        done = run_ranks(
            EXAMPLES / script,
            ranks,
            *arguments,
            keras=2 if script in WITH_TF_KERAS else 3,
            timeout=600,
            folder=tmp_path,
            TMPDIR=str(tmp_path),
        )
        return done.stdout

    return run
