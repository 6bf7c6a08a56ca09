# SPDX-License-Identifier: Apache-2.0
"""The files of this repository, and what they import."""

import ast
import pathlib
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfdist_ext"
CXX = (".cc", ".h", ".cu", ".cuh")
COMMENT = {".py": "#", ".sh": "#", **dict.fromkeys(CXX, "//")}


def tracked() -> list[pathlib.Path]:
    """Files of the repository, relative to it, in a copy without git too."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs a git checkout")
    return [p for p in map(pathlib.Path, listed) if (ROOT / p).is_file()]


def sources() -> list[pathlib.Path]:
    return [path for path in tracked() if path.suffix in COMMENT]


def texts(paths: list[pathlib.Path]) -> dict[pathlib.Path, str]:
    return {path: (ROOT / path).read_text() for path in paths}


def imported_modules(text: str) -> set[str]:
    """Names of all modules that a Python source imports, with their members."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names
