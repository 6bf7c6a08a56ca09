# SPDX-License-Identifier: Apache-2.0
"""Versions in the report's header; tiers; what runs beside what."""

import importlib.metadata
import os
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent

# A group of pytest-xdist: tests of one worker, one after another.
_RANKS = "ranks"
# Others that take as much memory.
_LARGE = ("test_large_tables.py",)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tiers by folder; tells pytest-xdist what to run in order.

    The tests of several processes come first, one after another: together
    they take longest, and two at a time would be short of memory.
    """
    for item in items:
        folders = item.path.relative_to(TESTS).parts[:-1]
        group = str(item.path.relative_to(TESTS))
        if set(folders) & {"process", "fault"}:
            item.add_marker(folders[0])
            group = _RANKS
        elif item.path.name in _LARGE:
            group = _RANKS
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=_after_ranks)


def _after_ranks(item: pytest.Item) -> bool:
    return item.get_closest_marker("xdist_group").args[0] != _RANKS
