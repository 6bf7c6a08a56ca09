# SPDX-License-Identifier: Apache-2.0
"""What this machine offers: TensorFlow, the compilers and CUDA."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys

# The first that takes the licence as pyproject.toml states it; the command for
# wheels came with 70.1.
SETUPTOOLS = 77
SUPPORTED = ("2.18", "2.19", "2.20", "2.21")

# Ampere and Hopper as machine code, PTX of the newest for what comes later.
CUDA_FLAGS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_90,code=compute_90",
]


class BuildError(SystemExit):
    """Ends the build with a message a user can act upon, no traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\ntfdist_ext: {message}\n")


@dataclasses.dataclass(frozen=True)
class Installed:
    """The TensorFlow distribution found, without importing it."""

    distribution: str
    version: str

    @property
    def minor(self) -> str:
        return ".".join(self.version.split(".")[:2])


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """Compilers and flags of one build."""

    tensorflow: Installed
    cxx: list[str]
    compile_flags: list[str]
    link_flags: list[str]
    nvcc: list[str] | None
    cuda_reason: str


def installed_tensorflow() -> Installed | None:
    """Returns the installed TensorFlow, None where there is none."""
    for name in ("tensorflow", "tensorflow-cpu"):
        try:
            return Installed(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def require_setuptools() -> None:
    """Ends the build where setuptools is too old for what setup.py imports.

    Raises:
        BuildError: an older one is imported than the build needs.
    """
    import setuptools

    found = setuptools.__version__
    if int(found.partition(".")[0]) < SETUPTOOLS:
        raise BuildError(
            f"the build needs setuptools {SETUPTOOLS} or newer; "
            f"{sys.executable} has setuptools {found}. Update it there, then "
            "install again:\n"
            f"    pip install -U 'setuptools>={SETUPTOOLS}'\n"
            "    pip install --no-build-isolation ."
        )


def find(folder: pathlib.Path) -> Toolchain:
    """Looks for everything the build needs.

    Args:
        folder: keeps TensorFlow's flags from one build to the next.

    Raises:
        BuildError: TensorFlow or the compiler is missing, or CUDA was
            asked for by TFDIST_CUDA=1 and is missing.
    """
    tensorflow = _require_tensorflow()
    cxx = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(cxx[0]) is None:
        raise BuildError(
            f"C++ compiler {cxx[0]} not found: `apt-get install g++`, or name "
            "one with CXX=..."
        )
    flags = known_flags(tensorflow, folder)
    nvcc, cuda_reason = _choose_nvcc(flags["cuda"])
    return Toolchain(
        tensorflow=tensorflow,
        cxx=cxx,
        compile_flags=flags["compile"],
        link_flags=flags["link"],
        nvcc=nvcc,
        cuda_reason=cuda_reason,
    )


def write_build_info(path: pathlib.Path, info: dict[str, object]) -> None:
    """Writes `_build_info.py`, which the version check at load time reads."""
    lines = [
        "# SPDX-License-Identifier: Apache-2.0",
        '"""Written by setup.py: what the shared library was built with."""',
        "",
        *(f"{key} = {value!r}" for key, value in info.items()),
        "",
    ]
    text = "\n".join(lines)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _require_tensorflow() -> Installed:
    found = installed_tensorflow()
    if found is None:
        raise BuildError(
            "TensorFlow is not installed in the environment that builds. The "
            "library is compiled against your TensorFlow, so install that "
            "first and let pip see it:\n"
            "    pip install -U 'tensorflow~=2.21.0' "
            f"'setuptools>={SETUPTOOLS}'\n"
            "    pip install --no-build-isolation ."
        )
    if found.minor not in SUPPORTED:
        raise BuildError(
            f"TensorFlow {found.version} is installed; supported are "
            f"{', '.join(SUPPORTED)}."
        )
    return found


def known_flags(
    tensorflow: Installed, folder: pathlib.Path
) -> dict[str, list[str]]:
    """Returns TensorFlow's flags; asks once per installation, for seconds."""
    found = importlib.metadata.distribution(tensorflow.distribution)
    package = pathlib.Path(str(found.locate_file("tensorflow/__init__.py")))
    installed = [str(package), package.stat().st_mtime_ns]
    saved = folder / f"tensorflow-{tensorflow.version}.json"
    try:
        known = json.loads(saved.read_text())
        if known["installed"] == installed:
            return known["flags"]
    except (OSError, ValueError, KeyError):
        pass
    flags = tensorflow_flags()
    folder.mkdir(parents=True, exist_ok=True)
    saved.write_text(json.dumps({"installed": installed, "flags": flags}))
    return flags


def tensorflow_flags() -> dict[str, list[str]]:
    """Asks tf.sysconfig in a process of its own, whose log is not shown."""
    script = (
        "import json, tensorflow as tf; s = tf.sysconfig; print(json.dumps({"
        "'compile': s.get_compile_flags(), 'link': s.get_link_flags(),"
        "'cuda': bool(s.get_build_info().get('is_cuda_build'))}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise BuildError(f"TensorFlow does not import:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def has_gpu(dev: pathlib.Path = pathlib.Path("/dev")) -> bool:
    """Whether the driver of NVIDIA has made a device: of Linux, or of WSL."""
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists()


def _choose_nvcc(tensorflow_has_cuda: object) -> tuple[list[str] | None, str]:
    """Returns nvcc's command, None for a CPU build, and the reason."""
    wish = os.environ.get("TFDIST_CUDA", "auto")
    if wish not in ("0", "1", "auto"):
        raise BuildError(f"TFDIST_CUDA must be 0, 1 or unset. Received: {wish}")
    if wish == "0":
        return None, "TFDIST_CUDA=0"
    nvcc = shlex.split(os.environ.get("NVCC", "nvcc"))
    found = shutil.which(nvcc[0]) or shutil.which("/usr/local/cuda/bin/nvcc")
    if wish == "1" and found is None:
        raise BuildError(
            "TFDIST_CUDA=1 asks for the CUDA kernels, but nvcc is not found: "
            "put it on PATH, or name it with NVCC=..., or unset TFDIST_CUDA."
        )
    if found is None:
        return None, "nvcc not found"
    if wish == "auto" and not has_gpu():
        return None, "no GPU here; TFDIST_CUDA=1 builds them all the same"
    if wish == "auto" and not tensorflow_has_cuda:
        return None, "this TensorFlow is built without CUDA"
    return [found, *nvcc[1:]], found
