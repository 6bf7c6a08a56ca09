# SPDX-License-Identifier: Apache-2.0
"""Builds the shared library from `custom_ops/` against installed TensorFlow.

Metadata and tool settings stand in `pyproject.toml`; this file holds only what
depends on the TensorFlow found at build time: the library, the pinned minor
version in the wheel's metadata, and `tfdist_ext/_build_info.py`.

Environment:
    TFDIST_CUDA: 0 never builds the CUDA sources, 1 insists on them; by default
        they are built on a machine with a GPU, where nvcc is found and
        TensorFlow is a CUDA build.
    TFDIST_VARIANT: builds a second library, "asan" with AddressSanitizer and
        UBSan, "tsan" with ThreadSanitizer, "coverage" with gcov's counters.
    TFDIST_LIBRARIES: a folder with a compiled library per TensorFlow minor. The
        wheel holds these, and nothing is compiled (`make wheels`).
    TFDIST_JOBS: compilations that run at once (2).
    TFDIST_UNITS: 0 compiles each source by itself: longer in all, but shorter
        for who changes one source many times.
    CXX, CXXFLAGS, LDFLAGS, NVCC, NVCCFLAGS: compilers and additional flags.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

ROOT = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends leave the root out.

from build_ops import toolchain  # noqa: E402

toolchain.require_setuptools()  # An old one lacks what comes next.

from setuptools import Extension  # noqa: E402
from setuptools import setup  # noqa: E402
from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

from build_ops import joint  # noqa: E402
from build_ops import library  # noqa: E402
from tfdist_ext.version import VERSION  # noqa: E402

LIBRARY = "tfdist_ext.ops._tfdist_ops"


class BuildLibrary(build_ext):
    """Compiles `custom_ops/` to one library that is not tied to a Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", os.sep) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = pathlib.Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if libraries := joint.folder():
            joint.copy(libraries, target.parent.parent)
            self._built = []
        elif variant := os.environ.get("TFDIST_VARIANT"):
            target = target.with_name(f"{target.stem}_{variant}.so")
            library.build(ROOT, target, variant)
            self._built = [target]
        else:
            info = target.parent.parent / "_build_info.py"
            built_with = library.build(ROOT, target)
            toolchain.write_build_info(info, built_with)
            self._built = [target, info]

    def copy_extensions_to_source(self) -> None:
        """Copies by rename: a process that runs the old library keeps it."""
        for built in self._built:
            place = ROOT / built.relative_to(
                pathlib.Path(self.build_lib).resolve()
            )
            partial = place.with_name(place.name + ".partial")
            shutil.copy2(built, partial)
            partial.replace(place)
            print(f"tfdist_ext: built {os.path.relpath(place)}", flush=True)

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in lists the sources.


class TaggedWheel(bdist_wheel):
    """The library has no Python ABI: one wheel serves 3.10 to 3.13."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def version(tensorflow: toolchain.Installed | None) -> str:
    """The local part tells wheels for one minor, and CUDA, apart."""
    cuda = os.environ.get("TFDIST_CUDA") == "1"
    if joint.folder():
        return f"{VERSION}+cuda" if cuda else VERSION
    if tensorflow is None:
        return VERSION
    return f"{VERSION}+tf{tensorflow.minor}{'.cuda' if cuda else ''}"


def requirements(tensorflow: toolchain.Installed | None) -> list[str]:
    """The minors in the wheel, or the supported ones in an sdist."""
    if libraries := joint.folder():
        return [joint.requirement(joint.minors(libraries))]
    if tensorflow is None:
        return [joint.requirement(toolchain.SUPPORTED)]
    return [f"{tensorflow.distribution}~={tensorflow.minor}.0"]


if __name__ == "__main__":
    found = toolchain.installed_tensorflow()
    setup(
        version=version(found),
        install_requires=requirements(found),
        ext_modules=[Extension(LIBRARY, sources=[])],
        cmdclass={"build_ext": BuildLibrary, "bdist_wheel": TaggedWheel},
    )
