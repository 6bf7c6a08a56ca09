# SPDX-License-Identifier: Apache-2.0
"""Versions in the report's header; ranks; what runs beside what."""

import fcntl
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests import tiers
from tests.ranks import pool as pool_lib
from tests.ranks.programs import Programs
from tests.ranks.servers import Servers


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


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """What ranks are forked from."""
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def pools(servers: Servers) -> Iterator[pool_lib.Pools]:
    """Ranks that wait for scenarios."""
    pools = pool_lib.Pools(servers)
    yield pools
    pools.close()


@pytest.fixture
def run_scenario(
    pools: pool_lib.Pools, tmp_path: pathlib.Path
) -> pool_lib.RunScenario:
    """Runs a scenario on some ranks, in the test's folder."""

    def run(scenario: str, *arguments: Any, **how: Any) -> list[Any]:
        return pools.run(scenario, tmp_path, *arguments, **how)

    return run


@pytest.fixture(scope="session")
def run_ranks(servers: Servers) -> Programs:
    """Runs a program on ranks of its own."""
    return Programs(servers)


@pytest.fixture(scope="session")
def emulated_ops(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Collectives between GPUs for a CPU, built by the first who asks."""
    from tests.fake_gpu import build  # imports TensorFlow

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    used = os.environ.get("TFDIST_LIBRARY", tiers.TESTS.parent / build.LIBRARY)
    with (folder / "emulated_ops.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(folder, pathlib.Path(used))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Marks the tiers; keeps on one worker what shares ranks.

    That are the tests of one folder with one number of ranks and one Keras, or
    of one library of kernels, or else of one file. Those with ranks come first,
    then slow ones: the many short ones fill what is left of either worker.
    """
    if not any("::" in argument for argument in config.args):
        tiers.check(items)
    for item in items:
        tiers.mark(item)
        path = item.path.relative_to(tiers.TESTS)
        item.add_marker(pytest.mark.xdist_group(_group(item, path)))
    items.sort(key=_place)


def _group(item: pytest.Item, path: pathlib.Path) -> str:
    arguments = tiers.arguments(item)
    if {"ranks", "keras"} <= set(arguments):
        ranks, keras = arguments["ranks"], arguments["keras"]
        return f"{path.parts[0]}, {ranks} ranks, Keras {keras}"
    if "gpu" in getattr(item, "fixturenames", ()):
        return "kernels for GPUs"
    return str(path)


def _place(item: pytest.Item) -> tuple[bool, int, int, str]:
    """Where an item comes: those that share ranks after each other."""
    path = item.path.relative_to(tiers.TESTS)
    arguments = tiers.arguments(item)
    fast = path.parts[0] not in tiers.TIERS
    if str(path) in tiers.SLOW:
        return fast, 0, 0, ""
    if fast or not {"ranks", "keras"} <= set(arguments):
        return fast, 9, 0, ""
    folder = path.parts[0]
    return fast, arguments["ranks"], -arguments["keras"], folder
