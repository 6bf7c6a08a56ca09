# SPDX-License-Identifier: Apache-2.0
"""Versions in the report's header; tiers; ranks; what runs beside what."""

import fcntl
import importlib.metadata
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks import pool as pool_lib
from tests.ranks.programs import Programs
from tests.ranks.servers import Servers

TESTS = pathlib.Path(__file__).parent
# Folders whose tests start ranks, and the tier that each is in.
TIERS = {"process": "process", "numbers": "process", "fault": "fault"}
# Half a minute each: single tests, a notebook, and kernels that are compiled
# for a CPU.
SLOW = (
    "comm/test_gpu_exchange.py",
    "cuda_on_cpu/test_emulation.py",
    "cuda_on_cpu/test_gpu_decoding.py",
    "cuda_on_cpu/test_gpu_ops.py",
    "examples/test_notebook.py",
    "ops/test_large_tables.py",
    "optimizers/test_legacy_keras.py",
)


# Of the tests that start ranks, `make test` runs those at 2 ranks with Keras 3,
# and of the compared programs those with this in their names.
EVERYDAY = {"ranks": 2, "keras": 3}
EVERYDAY_PROGRAMS = "-tables-uneven-"

# What `make test` runs with another TensorFlow than the default one is what may
# differ between versions. Without ranks, by folder or file: the build, private
# names, hooks, ops, layers, optimizers and the strategy.
VERSION_TESTS = (
    "callbacks",
    "embedding",
    "layers",
    "ops",
    "optimizers",
    "saving",
    "strategy",
    "test_build.py",
    "test_hooks.py",
    "test_private_names.py",
)
# At 2 ranks with both Kerases, modules of scenarios: loops, input, graphs,
# checkpoints, files and export.
VERSION_SCENARIOS = (
    "file_callbacks_scenarios",
    "files_scenarios",
    "fit_scenarios",
    "input_scenarios",
    "nested_graph_scenarios",
    "saving_scenarios",
    "serving_scenarios",
    "tf_keras_files_scenarios",
)
# A SavedModel is served by a process of its own.
VERSION_PROCESS = "test_process_without_this_package"
# And compared programs of every day, by the begin of their names: loops, data
# and state, but not every loss, metric and step.
VERSION_PROGRAMS = (
    "callback/",
    "data/",
    "gradient/",
    "loop/",
    "optimizer/",
    "recommender/",
    "sequence/",
    "state/",
)


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
    used = os.environ.get("TFDIST_LIBRARY", TESTS.parent / build.LIBRARY)
    with (folder / "emulated_ops.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build.build(folder, pathlib.Path(used))


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tiers by folder; keeps on one worker what shares ranks.

    That are the tests of one number of ranks and one Keras, or of one library
    of kernels, or else of one file. Those with ranks come first, then slow
    ones: the many short ones fill what is left of either worker.
    """
    for item in items:
        path = item.path.relative_to(TESTS)
        if path.parts[0] in TIERS:
            item.add_marker(TIERS[path.parts[0]])
        if str(path) in SLOW:
            item.add_marker("slow")
        if not _is_everyday(item, path):
            item.add_marker("extended")
        if _is_for_versions(item, path):
            item.add_marker("versions")
        item.add_marker(pytest.mark.xdist_group(_group(item, path)))
    items.sort(key=_place)


def _is_everyday(item: pytest.Item, path: pathlib.Path) -> bool:
    """Whether `make test` runs a test; only `make test-all` runs the others."""
    tier = TIERS.get(path.parts[0])
    if tier is None:
        return not {"slow", "process", "fault"} & _marks(item)
    if tier == "fault" or not EVERYDAY.items() <= _arguments(item).items():
        return False
    return path.parts[0] != "numbers" or EVERYDAY_PROGRAMS in item.name


def _is_for_versions(item: pytest.Item, path: pathlib.Path) -> bool:
    """Whether `make test` runs a test with another TensorFlow."""
    folder, name = path.parts[0], item.name
    if folder == "numbers":
        programs = [f"[{program}" for program in VERSION_PROGRAMS]
        return _is_everyday(item, path) and any(map(name.count, programs))
    if folder == "process":
        modules = [f"-{module}." for module in VERSION_SCENARIOS]
        chosen = any(map(name.count, (*modules, VERSION_PROCESS)))
        return chosen and _arguments(item).get("ranks") == 2
    if not {str(path), folder} & set(VERSION_TESTS):
        return False
    hooks = str(path) == "test_hooks.py"  # In both Kerases, some with ranks.
    return hooks or _is_everyday(item, path)


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}


def _group(item: pytest.Item, path: pathlib.Path) -> str:
    arguments = _arguments(item)
    if {"ranks", "keras"} <= set(arguments):
        return "{ranks} ranks, Keras {keras}".format(**arguments)
    if "gpu" in getattr(item, "fixturenames", ()):
        return "kernels for GPUs"
    return str(path)


def _arguments(item: pytest.Item) -> dict[str, Any]:
    return getattr(getattr(item, "callspec", None), "params", {})


def _place(item: pytest.Item) -> tuple[bool, int, int]:
    """Where an item comes: those that share ranks after each other."""
    path = item.path.relative_to(TESTS)
    arguments = _arguments(item)
    fast = path.parts[0] not in TIERS
    if str(path) in SLOW:
        return fast, 0, 0
    if fast or not {"ranks", "keras"} <= set(arguments):
        return fast, 9, 0
    return fast, arguments["ranks"], -arguments["keras"]
