# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels for a CPU, under AddressSanitizer and UBSan.

As a program it checks a library that was built: its arguments are the
library, the schedules' seeds, and which kernels.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import checks  # noqa: E402
from benchmarks.gpu import device  # noqa: E402
from benchmarks.gpu.build import FUNCTORS  # noqa: E402
from tests.cuda_on_cpu.translate import translate  # noqa: E402

FLAGS = [
    *("-std=c++17", "-O0", "-g1", "-fPIC", "-Wno-attributes"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
    "-fno-sanitize=null,vptr,object-size",
]
SEED = "tests/cuda_on_cpu/seed.cc"


def compile_one(source: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Compiles a source of C++, or of CUDA after its translation."""
    if source.name.endswith((".cu.cc", ".cu")):
        translated = output.with_suffix(".translated.cc")
        translated.write_text(
            f'#line 1 "{source}"\n{translate(source.read_text())}'
        )
        source = translated
    includes = [f"-I{HERE}", f"-I{ROOT}"]
    command = ["g++", *FLAGS, *includes, "-c", source, "-o", output]
    subprocess.run(command, check=True)
    return output


def link(objects: list[pathlib.Path], library: pathlib.Path) -> pathlib.Path:
    command = ["g++", "-shared", *FLAGS, *objects, "-o", library]
    subprocess.run(command, check=True)
    return library


def build(folder: pathlib.Path, sources: list[str]) -> list[pathlib.Path]:
    """Compiles kernels and what they are checked with, two at a time."""
    paths = [ROOT / source for source in [*sources, *FUNCTORS, SEED]]
    outputs = [folder / (path.name + ".o") for path in paths]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, paths, outputs))


def run(
    library: pathlib.Path, schedules: list[int], kernels: list[str]
) -> subprocess.CompletedProcess[str]:
    """Checks a library in a process of its own, which the sanitizers may end.

    They must be loaded before Python; Python keeps memory until its end.
    """
    preload = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    return subprocess.run(
        [
            sys.executable,
            __file__,
            str(library),
            ",".join(map(str, schedules)),
            *kernels,
        ],
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(preload),
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def main(library: str, schedules: str, *kernels: str) -> int:
    emulated = device.Device(pathlib.Path(library), guards=False)
    count, wrong = 0, []
    for seed in map(int, schedules.split(",")):
        emulated.library.SetSchedule(ctypes.c_uint32(seed))
        for kernel in kernels:
            cases, failures = checks.check(emulated, kernel, seed)
            count += cases
            wrong += [f"schedule {seed}: {text}" for text in failures]
    print(f"{count} cases, {len(wrong)} wrong", *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
