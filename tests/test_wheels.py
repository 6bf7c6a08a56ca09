# SPDX-License-Identifier: Apache-2.0
"""Tests of the wheel for several TensorFlow minors, without a compilation."""

import email
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import setup
from build_ops import joint
from build_ops import toolchain
from build_ops import wheels

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.fixture
def libraries(tmp_path: pathlib.Path) -> pathlib.Path:
    """Stands for libraries that are compiled for two minors."""
    folder = tmp_path / "libraries"
    for minor, version in (("2.19", "2.19.1"), ("2.21", "2.21.0")):
        library = folder / minor / joint.LIBRARY
        library.parent.mkdir(parents=True)
        library.write_text(f"compiled for {minor}")
        toolchain.write_build_info(
            folder / minor / joint.INFO,
            {
                "TENSORFLOW_VERSION": minor,
                "TENSORFLOW_BUILT_WITH": version,
                "CUDA": False,
                "COMPILE_FLAGS": "-O3",
            },
        )
    return folder


def build_wheel(
    folder: pathlib.Path, libraries: pathlib.Path
) -> zipfile.ZipFile:
    """Runs setup.py in a copy of the tree, as `make wheels` does."""
    source = folder / "source"
    ignored = shutil.ignore_patterns("*.so", "_build_info.py", "__pycache__")
    for name in ("build_ops", "tfdist_ext"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=source,
        env={**os.environ, "TFDIST_LIBRARIES": str(libraries)},
        check=True,
        timeout=300,
    )
    (wheel,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_the_developers_environment_has_the_tools():
    wheels.require_tools()


def test_one_wheel_holds_the_libraries_of_all_minors(
    tmp_path: pathlib.Path,
    libraries: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TFDIST_CUDA", raising=False)
    wheel = build_wheel(tmp_path, libraries)
    assert "-py3-none-linux_" in str(wheel.filename)
    names = wheel.namelist()
    assert [name for name in names if name.endswith(".so")] == [
        "tfdist_ext/ops/_tfdist_ops_tf2_19.so",
        "tfdist_ext/ops/_tfdist_ops_tf2_21.so",
    ]
    text = wheel.read("tfdist_ext/ops/_tfdist_ops_tf2_19.so")
    assert text == b"compiled for 2.19"
    (path,) = (name for name in names if name.endswith("/METADATA"))
    metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Version"] == setup.VERSION
    assert metadata["Requires-Python"] == "<3.14,>=3.10"
    needed = metadata.get_all("Requires-Dist", [])
    assert "tensorflow!=2.20.*,<2.22,>=2.19" in needed
    info: dict[str, object] = {}
    exec(wheel.read("tfdist_ext/_build_info.py"), info)
    assert info["TENSORFLOW_BUILT_WITH"] == {"2.19": "2.19.1", "2.21": "2.21.0"}
    assert info["CUDA"] is False


def test_metadata_of_a_joint_wheel(
    libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDIST_LIBRARIES", str(libraries))
    found = toolchain.Installed("tensorflow", "2.21.0")
    monkeypatch.delenv("TFDIST_CUDA", raising=False)
    assert setup.version(found) == setup.VERSION
    assert setup.requirements(found) == ["tensorflow>=2.19,<2.22,!=2.20.*"]
    monkeypatch.setenv("TFDIST_CUDA", "1")
    assert setup.version(found) == f"{setup.VERSION}+cuda"


@pytest.mark.parametrize(
    "minors, expected",
    [
        (toolchain.SUPPORTED, "tensorflow>=2.18,<2.22"),
        (["2.20"], "tensorflow>=2.20,<2.21"),
        (["2.21", "2.18"], "tensorflow>=2.18,<2.22,!=2.19.*,!=2.20.*"),
    ],
)
def test_requirement_allows_the_minors_in_the_wheel(
    minors: list[str], expected: str
) -> None:
    assert joint.requirement(minors) == expected


def test_folder_without_libraries_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFDIST_LIBRARIES", str(tmp_path))
    with pytest.raises(toolchain.BuildError, match=r"make wheels.*Received"):
        setup.requirements(None)


def test_kinds_of_libraries_are_not_mixed(
    tmp_path: pathlib.Path, libraries: pathlib.Path
) -> None:
    info = libraries / "2.19" / joint.INFO
    info.write_text(info.read_text().replace("CUDA = False", "CUDA = True"))
    with pytest.raises(toolchain.BuildError, match="with and without CUDA"):
        joint.copy(libraries, tmp_path / "tfdist_ext")


def test_pythons_are_those_that_are_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert tuple(wheels.PYTHONS) == toolchain.SUPPORTED
    for version in {p for each in wheels.PYTHONS.values() for p in each}:
        assert f'"Programming Language :: Python :: {version}"' in text


def test_sources_are_unpacked_into_an_empty_folder(
    tmp_path: pathlib.Path,
) -> None:
    source = tmp_path / "tfdist_ext-1.0"
    source.mkdir()
    (source / "setup.py").write_text("")
    sdist = tmp_path / "tfdist_ext-1.0.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(source, source.name)
    folder = tmp_path / "wheels"
    (folder / source.name).mkdir(parents=True)
    (folder / source.name / "old.py").write_text("")
    unpacked = wheels.unpack(sdist, folder)
    assert unpacked == folder / source.name
    assert list(unpacked.iterdir()) == [unpacked / "setup.py"]


def test_checksums_are_those_of_sha256sum(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"a")
    for _ in range(2):  # It does not list itself.
        wheels.write_checksums(tmp_path)
        line = f"{hashlib.sha256(b'a').hexdigest()}  a.whl\n"
        assert (tmp_path / "SHA256SUMS").read_text() == line


def test_matrix_has_a_cell_per_tensorflow_and_python() -> None:
    results = {("2.18", "3.12"): "trained", ("2.20", "3.13"): "no Python"}
    assert wheels.matrix(results).splitlines() == [
        "| TensorFlow | Python 3.12 | Python 3.13 |",
        "| --- | --- | --- |",
        "| 2.18 | trained | no TensorFlow |",
        "| 2.20 | no TensorFlow | no Python |",
    ]


def test_python_is_found_by_its_version(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = tmp_path / "versions" / f"{version}.7" / "bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(sys.executable)
    shim = tmp_path / f"python{version}"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert wheels.find_python(version) == str(folder / "python")
    assert wheels.find_python("2.7") is None


def test_failure_of_a_wheel_ends_with_an_error(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wheels, "DIST", tmp_path)
    monkeypatch.setattr(
        wheels,
        "attempt",
        lambda _, minor, python: (
            "trained" if python == "3.11" else "install failed"
        ),
    )
    wheel = tmp_path / "a.whl"
    wheel.write_text("")
    options = ["--wheel", str(wheel), "--tensorflow", "2.21", "--python"]
    wheels.main([*options, "3.11"])
    assert "| 2.21 | not chosen | trained | not" in capsys.readouterr().out
    with pytest.raises(toolchain.BuildError, match=r"2\.21 on Python 3\.13"):
        wheels.main([*options, "3.11", "3.13"])


@pytest.mark.parametrize("option", ["--tensorflow=2.17", "--python=3.9"])
def test_unknown_versions_are_refused(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        wheels.main([option])
    assert "invalid choice" in capsys.readouterr().err
