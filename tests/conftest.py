# SPDX-License-Identifier: Apache-2.0
"""Versions in the report's header; tiers; what runs beside what."""

import importlib.metadata
import os
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def pytest_report_header() -> list[str]:
    names = ("tensorflow", "keras", "tf_keras", "numpy")
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    library = os.environ.get("TFDIST_LIBRARY", "the one in the package")
    return [f"versions: {versions}", f"shared library: {library}"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tiers by folder; keeps a file's tests on one worker.

    Files that start ranks come first: they take longest, and the many short
    ones then fill what is left of either worker.
    """
    for item in items:
        path = item.path.relative_to(TESTS)
        for tier in ("process", "fault"):
            if tier in path.parts:
                item.add_marker(tier)
        item.add_marker(pytest.mark.xdist_group(str(path)))
    items.sort(key=_is_fast)


def _is_fast(item: pytest.Item) -> bool:
    folders = item.path.relative_to(TESTS).parts
    return not {"process", "fault"} & set(folders)
