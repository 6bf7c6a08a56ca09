# SPDX-License-Identifier: Apache-2.0
"""What every test gets: which versions ran, in the header of the report."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tiers by folder and runs the fast one first."""
    for item in items:
        for tier in ("process", "fault"):
            if TESTS / tier in item.path.parents:
                item.add_marker(tier)
    items.sort(key=_tier)


def _tier(item: pytest.Item) -> int:
    if item.get_closest_marker("fault"):
        return 2
    return 1 if item.get_closest_marker("process") else 0
