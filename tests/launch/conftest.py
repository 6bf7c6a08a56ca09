# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the launcher's tests."""

import pathlib
import textwrap
from collections.abc import Callable

import pytest

PREAMBLE = """
import glob, json, os, signal, subprocess, sys, time
CONFIG = json.loads(os.environ["TF_CONFIG"])
RANK = CONFIG["task"]["index"]

def meet():
    open(f"{__file__}.{RANK}", "w").close()
    ranks = len(CONFIG["cluster"]["worker"])
    while len(glob.glob(glob.escape(__file__) + ".*")) < ranks:
        time.sleep(0.02)
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> Callable[[str], str]:
    """Writes a program; TF_CONFIG and the rank are at its hand.

    `meet()` waits for all ranks: nobody knows how long they take to start.
    """

    def write(body: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        return str(path)

    return write
