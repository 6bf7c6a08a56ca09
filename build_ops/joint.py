# SPDX-License-Identifier: Apache-2.0
"""One wheel with the libraries of several TensorFlow minors.

`build_ops/wheels.py` compiles a library per minor; TFDIST_LIBRARIES names the
folder to setup.py, which puts them into one wheel. `tfdist_ext/ops/library.py`
loads the one for the installed TensorFlow.
"""

from __future__ import annotations

import os
import pathlib
import runpy
import shutil
from collections.abc import Iterable

from build_ops import toolchain

LIBRARY = pathlib.Path("tfdist_ext", "ops", "_tfdist_ops.so")
INFO = pathlib.Path("tfdist_ext", "_build_info.py")


def folder() -> pathlib.Path | None:
    """Returns the folder with compiled libraries, None for a usual build.

    Raises:
        toolchain.BuildError: TFDIST_LIBRARIES names no folder with libraries.
    """
    named = os.environ.get("TFDIST_LIBRARIES")
    if not named:
        return None
    found = pathlib.Path(named).resolve()
    if not minors(found):
        raise toolchain.BuildError(
            f"TFDIST_LIBRARIES must name a folder with {LIBRARY} in a folder "
            f"per TensorFlow minor ({', '.join(toolchain.SUPPORTED)}), as "
            f"`make wheels` compiles them. Received: {named}"
        )
    return found


def minors(libraries: pathlib.Path) -> list[str]:
    """Returns the TensorFlow minors that have a library, oldest first."""
    return [
        minor
        for minor in toolchain.SUPPORTED
        if (libraries / minor / LIBRARY).exists()
    ]


def file_name(minor: str) -> str:
    """Returns the name of a minor's library in the wheel."""
    return f"{LIBRARY.stem}_tf{minor.replace('.', '_')}.so"


def requirement(chosen: Iterable[str]) -> str:
    """Returns the requirement that allows these minors and no others."""
    numbers = sorted(int(minor.split(".")[1]) for minor in chosen)
    gaps = sorted({*range(numbers[0], numbers[-1])} - {*numbers})
    return ",".join(
        [
            f"tensorflow>=2.{numbers[0]}",
            f"<2.{numbers[-1] + 1}",
            *(f"!=2.{number}.*" for number in gaps),
        ]
    )


def copy(libraries: pathlib.Path, package: pathlib.Path) -> None:
    """Copies the libraries into the package and says so in `_build_info.py`.

    Args:
        libraries: the folder with compiled libraries.
        package: the folder of `tfdist_ext` to write into.

    Raises:
        toolchain.BuildError: some have CUDA kernels and others not.
    """
    infos = {
        minor: runpy.run_path(str(libraries / minor / INFO))
        for minor in minors(libraries)
    }
    for minor in infos:
        target = package / "ops" / file_name(minor)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(libraries / minor / LIBRARY, target)
    cuda = {info["CUDA"] for info in infos.values()}
    if len(cuda) != 1:
        raise toolchain.BuildError(
            f"{libraries} has libraries with and without CUDA kernels; a wheel "
            "has one kind. Compile all again with `make wheels`."
        )
    toolchain.write_build_info(
        package / INFO.name,
        {
            "TENSORFLOW_BUILT_WITH": {
                minor: info["TENSORFLOW_BUILT_WITH"]
                for minor, info in infos.items()
            },
            "CUDA": cuda.pop(),
            "COMPILE_FLAGS": next(iter(infos.values()))["COMPILE_FLAGS"],
        },
    )
