# SPDX-License-Identifier: Apache-2.0
"""The kernels under emulation, and what the emulation finds."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from benchmarks.gpu import build
from benchmarks.gpu import checks
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.translate import translate

DECODING = "custom_ops/codec/decode_ids_functor.cu.cc"
COMBINE = "custom_ops/lookup/combine_functor.cu.cc"
GRADIENT = "custom_ops/lookup/lookup_grad_functor.cu.cc"
LOOKUP = "custom_ops/lookup/lookup_functor.cu.cc"
UPDATES = "custom_ops/optimizer/row_update_functor.cu.cc"
WIRE = "custom_ops/codec/wire_functor.cu.cc"


@pytest.fixture(scope="module")
def threads(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("threads")
    source = emulated.HERE / "threads.cu"
    compiled = emulated.compile_one(source, folder / "threads.o")
    command = ["g++", *emulated.FLAGS, compiled, "-o", folder / "threads"]
    subprocess.run(command, check=True)
    return folder / "threads"


@pytest.mark.parametrize(
    "what, found",
    [
        ("reverse", None),
        ("lanes", None),
        ("write", None),
        ("too many threads", None),
        ("no barrier", "wrong numbers"),
        ("deadlock", "__syncthreads: waits for ever"),
        ("ended lane", "__shfl_sync: a lane has ended"),
        ("out of bounds", "heap-buffer-overflow"),
    ],
)
def test_the_emulation_finds_what_is_wrong(
    threads: pathlib.Path, what: str, found: str | None
) -> None:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    for schedule in range(4):
        done = subprocess.run(
            [threads, what, str(schedule)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode == 0) == (found is None), done.stderr
        assert (found or "") in done.stderr


def test_only_launches_and_dynamic_memory_are_rewritten() -> None:
    source = "int a;\n  Sum<T, K<2>>\n<<<n, (1 << 3), 0, s>>>(x, f(y));\nint b;"
    assert translate(source) == (
        "int a;\n  cuda_on_cpu::LaunchChecked([&] { Sum<T, K<2>>(x, f(y)); }, "
        "n, (1 << 3), 0, s);\nint b;"
    )
    assert translate("extern __shared__ unsigned long a[];") == (
        "unsigned long* const a = cuda_on_cpu::DynamicShared<unsigned long>();"
    )


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[pathlib.Path]:
    folder = tmp_path_factory.mktemp("kernels")
    return emulated.build(folder, build.kernels())


def test_kernels_compute_what_the_cpu_does(
    objects: list[pathlib.Path], tmp_path: pathlib.Path
) -> None:
    library = emulated.link(objects, tmp_path / "kernels.so")
    done = emulated.run(library, [0, 1, 2], list(checks.KERNELS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 wrong" in done.stdout


@pytest.mark.parametrize(
    "source, right, wrong, kernel",
    [
        (COMBINE, "column < block.width", "column <= block.width", "parts"),
        (DECODING, "b < args.block_count", "b <= args.block_count", "decoding"),
        (
            DECODING,
            "b < args.block_count",
            "b + 1 < args.block_count",
            "decoding",
        ),
        (DECODING, "atomicMin", "atomicMax", "decoding"),
        (GRADIENT, "      __syncthreads();\n      if", "      if", "gradient"),
        (GRADIENT, "      __syncthreads();\n    }", "    }", "gradient"),
        (LOOKUP, "column < block.width", "column <= block.width", "lookup"),
        (UPDATES, "half = group / 2", "half = group / 4", "updates"),
        (WIRE, "first + kCount <= count", "first < count", "values"),
    ],
)
def test_a_kernel_with_an_error_is_found(
    objects: list[pathlib.Path],
    tmp_path: pathlib.Path,
    source: str,
    right: str,
    wrong: str,
    kernel: str,
) -> None:
    """A barrier less, a bound off by one, a step too few."""
    text = (emulated.ROOT / source).read_text()
    assert text.count(right) == 1
    changed = tmp_path / pathlib.Path(source).name
    changed.write_text(text.replace(right, wrong))
    compiled = emulated.compile_one(changed, tmp_path / "changed.o")
    same = [o for o in objects if not o.name.startswith(changed.name)]
    assert len(same) == len(objects) - 1
    library = emulated.link([*same, compiled], tmp_path / "changed.so")
    done = emulated.run(library, [3], [kernel])
    assert done.returncode != 0, "nothing was found"
    assert (
        "wrong" in done.stdout
        or "Sanitizer" in done.stderr
        or ("runtime error" in done.stderr)
    ), done.stdout + done.stderr
