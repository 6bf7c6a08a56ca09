# SPDX-License-Identifier: Apache-2.0
"""Tests of the build: what it says when something is missing, what it redoes.

A compiler that only writes down its calls stands in for g++ and nvcc.
"""

import json
import os
import pathlib
import stat
import subprocess
import sys

import pytest
import tensorflow as tf

import setup
from build_ops import library
from build_ops import toolchain

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Writes the files that -o and -MF name; fails on sources that say #error. A
# unit stands for the sources it includes.
COMPILER = f"""#!{sys.executable}
import pathlib, sys
arguments = sys.argv[1:]
def value(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None
root = pathlib.Path(sys.argv[0]).parent
source = value("-c")
text = pathlib.Path(source).read_text() if source else ""
if "#error" in text:
    sys.exit("this source does not compile")
if source:
    included = [line.split('"')[1] for line in text.splitlines()]
    read = [root / name for name in included] or [pathlib.Path(source)]
    names = [*read, source, root / "custom_ops" / "common" / "common.h"]
    pathlib.Path(value("-MF")).write_text(
        f"{{value('-o')}}: " + " \\\\\\n ".join(map(str, names)) + "\\n")
    with open(sys.argv[0] + ".log", "a") as log:
        log.write(" ".join(path.name for path in read) + "\\n")
if value("-o") and "-E" not in arguments:
    pathlib.Path(value("-o")).write_text("built")
"""


@pytest.fixture
def tree(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """A source tree with CPU and CUDA sources, a GPU, and fake compilers."""
    ops = tmp_path / "custom_ops" / "common"
    ops.mkdir(parents=True)
    for name in ("common.h", "one.cc", "one_functor.cc", "two.cc", "two.cu.cc"):
        (ops / name).write_text("")
    for variable, name in (("CXX", "g++"), ("NVCC", "nvcc")):
        compiler = tmp_path / name
        compiler.write_text(COMPILER)
        compiler.chmod(compiler.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv(variable, str(compiler))
    for variable in ("TFDIST_CUDA", "TFDIST_UNITS", "CXXFLAGS", "LDFLAGS"):
        monkeypatch.delenv(variable, raising=False)
    set_tensorflow(monkeypatch, cuda=True)
    monkeypatch.setattr(toolchain, "has_gpu", lambda: True)
    return tmp_path


def set_tensorflow(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    flags = {"compile": ["-Iinclude"], "link": ["-ltf"], "cuda": cuda}
    monkeypatch.setattr(toolchain, "known_flags", lambda *_: flags)


def build(tree: pathlib.Path, variant: str = "") -> list[str]:
    """Builds and returns the names of the sources that were compiled."""
    logs = [tree / "g++.log", tree / "nvcc.log"]
    for log in logs:
        log.write_text("")
    info = library.build(tree, tree / "library.so", variant)
    assert (tree / "library.so").read_text() == "built"
    compiled = sorted(line for log in logs for line in log.read_text().split())
    return [*compiled, f"CUDA={info['CUDA']}"]


def test_only_what_changed_is_compiled_again(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = ["one.cc", "two.cc"]
    everything = ["one.cc", "one_functor.cc", "two.cc", "two.cu.cc"]
    ops = tree / "custom_ops" / "common"
    assert build(tree) == [*everything, "CUDA=True"]
    assert build(tree) == ["CUDA=True"]
    os.utime(ops / "one.cc", (2e9, 2e9))
    assert build(tree) == [*unit, "CUDA=True"]
    os.utime(ops / "one.cc", (0, 0))
    os.utime(ops / "common.h", (2e9, 2e9))
    assert build(tree) == [*everything, "CUDA=True"]
    os.utime(ops / "common.h", (0, 0))
    (ops / "new.cc").write_text("")
    assert build(tree) == ["new.cc", *unit, "CUDA=True"]
    (ops / "new.cc").unlink()
    assert build(tree) == [*unit, "CUDA=True"]
    monkeypatch.setenv("CXXFLAGS", "-march=native")
    assert build(tree) == ["one.cc", "one_functor.cc", "two.cc", "CUDA=True"]


def test_sources_of_a_folder_are_one_unit(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tree / "custom_ops" / "other"
    other.mkdir()
    (other / "three.cc").write_text("")
    build(tree)
    runs = (tree / "g++.log").read_text().splitlines()
    assert sorted(runs) == ["one.cc two.cc", "one_functor.cc", "three.cc"]
    monkeypatch.setenv("TFDIST_UNITS", "0")
    assert "one.cc" in build(tree)
    os.utime(tree / "custom_ops" / "common" / "one.cc", (2e9, 2e9))
    assert build(tree) == ["one.cc", "CUDA=True"]


def test_cuda_follows_what_is_there(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = ["one.cc", "one_functor.cc", "two.cc", "CUDA=False"]
    assert build(tree, "asan") == cpu
    assert build(tree, "coverage") == cpu
    monkeypatch.setenv("TFDIST_CUDA", "0")
    assert build(tree) == cpu
    monkeypatch.setenv("TFDIST_CUDA", "1")
    set_tensorflow(monkeypatch, cuda=False)
    assert build(tree)[-1] == "CUDA=True"
    monkeypatch.delenv("TFDIST_CUDA")
    assert build(tree)[-1] == "CUDA=False"


def test_a_compiler_for_cuda_alone_is_no_reason_to_use_it(
    tree: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(toolchain, "has_gpu", lambda: False)
    assert build(tree)[-1] == "CUDA=False"
    assert "no GPU here; TFDIST_CUDA=1 builds" in capsys.readouterr().out
    monkeypatch.setenv("TFDIST_CUDA", "1")
    assert build(tree)[-1] == "CUDA=True"


@pytest.mark.parametrize(
    "device, found",
    [("nvidia0", True), ("nvidia3", True), ("dxg", True), ("nvidiactl", False)],
)
def test_a_gpu_is_a_device_of_the_driver(
    tmp_path: pathlib.Path, device: str, found: bool
) -> None:
    (tmp_path / device).touch()
    assert toolchain.has_gpu(tmp_path) == found


def test_cuda_that_does_not_compile_leaves_a_cpu_build(
    tree: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tree / "custom_ops" / "common" / "two.cu.cc").write_text("#error")
    assert build(tree)[-1] == "CUDA=False"
    assert "CUDA kernels failed, building without" in capsys.readouterr().out
    monkeypatch.setenv("TFDIST_CUDA", "1")
    with pytest.raises(toolchain.BuildError, match="does not compile"):
        build(tree)


def test_cuda_demanded_without_nvcc_is_an_error(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain.shutil, "which", which_without("nvcc"))
    assert build(tree)[-1] == "CUDA=False"
    monkeypatch.setenv("TFDIST_CUDA", "1")
    with pytest.raises(toolchain.BuildError, match="nvcc is not found"):
        build(tree)


def test_an_unknown_variant_is_an_error(tree: pathlib.Path) -> None:
    with pytest.raises(toolchain.BuildError, match="one of asan, tsan, cov"):
        build(tree, "msan")


def which_without(name: str):
    return lambda command: None if name in command else command


def test_a_missing_compiler_is_named(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(toolchain.BuildError, match="apt-get install g\\+\\+"):
        build(tree)


@pytest.mark.parametrize(
    "found, message",
    [
        (None, "pip install --no-build-isolation"),
        (toolchain.Installed("tensorflow", "2.17.1"), "2.18, 2.19, 2.20, 2.21"),
    ],
)
def test_unsuitable_tensorflow_is_explained(
    tree: pathlib.Path, monkeypatch: pytest.MonkeyPatch, found, message: str
) -> None:
    monkeypatch.setattr(toolchain, "installed_tensorflow", lambda: found)
    with pytest.raises(toolchain.BuildError, match=message):
        build(tree)


def test_the_library_in_the_tree_is_for_the_installed_tensorflow() -> None:
    from tfdist_ext import _build_info

    assert tf.__version__.startswith(_build_info.TENSORFLOW_VERSION + ".")
    assert (ROOT / "tfdist_ext" / "ops" / "_tfdist_ops.so").exists()


@pytest.mark.parametrize("found", ["65.5.0", "70.1.0", "76.1.0"])
def test_an_old_setuptools_is_named_before_anything_is_imported(
    tmp_path: pathlib.Path, found: str
) -> None:
    (tmp_path / "setuptools.py").write_text(f"__version__ = '{found}'")
    done = subprocess.run(
        [sys.executable, str(ROOT / "setup.py"), "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for text in ("setuptools 77 or newer", found, "-U 'setuptools>=77'"):
        assert text in done.stderr


def test_setuptools_that_is_needed_is_named_once() -> None:
    toolchain.require_setuptools()
    wanted = f'"setuptools>={toolchain.SETUPTOOLS}"'
    assert f"requires = [{wanted}]" in (ROOT / "pyproject.toml").read_text()
    assert wanted in (ROOT / "README.md").read_text()


def test_tensorflow_is_asked_once_per_installation(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "tensorflow" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    metadata = tmp_path / "tensorflow-2.21.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Name: tensorflow\nVersion: 2.21.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    asked = []
    monkeypatch.setattr(
        toolchain, "tensorflow_flags", lambda: asked.append(1) or {"cuda": True}
    )
    found = toolchain.Installed("tensorflow", "2.21.0")
    folder = tmp_path / "build"
    for _ in range(2):
        assert toolchain.known_flags(found, folder) == {"cuda": True}
    assert len(asked) == 1
    os.utime(package, (2e9, 2e9))
    toolchain.known_flags(found, folder)
    assert len(asked) == 2
    (folder / "tensorflow-2.21.0.json").write_text("{")
    toolchain.known_flags(found, folder)
    assert len(asked) == 3


def test_metadata_is_bound_to_the_tensorflow_minor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TFDIST_CUDA", raising=False)
    found = toolchain.Installed("tensorflow-cpu", "2.18.1")
    assert setup.requirements(found) == ["tensorflow-cpu~=2.18.0"]
    assert setup.version(found).endswith("+tf2.18")
    monkeypatch.setenv("TFDIST_CUDA", "1")
    assert setup.version(found).endswith("+tf2.18.cuda")
    assert setup.requirements(None) == ["tensorflow>=2.18,<2.22"]


def test_build_info_is_python(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "_build_info.py"
    toolchain.write_build_info(path, {"A": "x'y", "CUDA": False})
    values: dict[str, object] = {}
    exec(path.read_text(), values)
    assert json.dumps([values["A"], values["CUDA"]]) == '["x\'y", false]'
    before = path.stat().st_mtime_ns
    toolchain.write_build_info(path, {"A": "x'y", "CUDA": False})
    assert path.stat().st_mtime_ns == before
