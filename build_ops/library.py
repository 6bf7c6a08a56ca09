# SPDX-License-Identifier: Apache-2.0
"""Compiles `custom_ops/` to one shared library, only what has changed.

Most of the time goes to TensorFlow's headers, so the sources of a folder are
compiled together, as one unit that includes them. An object is compiled again
when its command line, its source or a header it read last time (gcc's `-MMD`
list) has changed. Objects of different TensorFlow versions and of variants live
in folders of their own.
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shlex
import subprocess

from build_ops import toolchain

# TensorFlow 2.21 deprecates what 2.18 has no successor for.
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-sign-compare",
    "-Wno-deprecated-declarations",
]
# Without -fno-math-errno gcc does not vectorise loops over square roots.
# Without -ffp-contract=off a sum of products is rounded once on processors that
# can do so and twice on others, and replicated rows of two ranks would differ.
# gcc inlines less in a large unit, which that of a folder is.
OPTIMIZE = [
    *("-O3", "-fno-math-errno", "-ffp-contract=off", "-DNDEBUG"),
    *("--param", "large-unit-insns=1000000"),
]
# vptr checks need type information that TensorFlow's library does not export;
# with the null checks gcc does not take an address for a constant, and absl
# needs that (AddressSanitizer reports null pointers all the same).
# With atomic updates counts of threads are right.
VARIANTS = {
    "asan": [
        "-fsanitize=address,undefined",
        "-fno-sanitize=vptr,null,nonnull-attribute,returns-nonnull-attribute",
        "-fno-sanitize-recover=undefined",
    ],
    "tsan": ["-fsanitize=thread"],
    "coverage": ["--coverage", "-fprofile-update=atomic"],
}
# Kernels of ops for GPUs: C++ that needs CUDA's headers.
GPU_KERNELS = "_gpu_kernels.cc"
# The loops that take most of a step, most of them without TensorFlow's headers.
# Each is compiled by itself, so its machine code does not depend on other code.
FUNCTORS = "_functor.cc"
DEBUG = ["-O1", "-g", "-fno-omit-frame-pointer"]


def build(
    root: pathlib.Path, target: pathlib.Path, variant: str = ""
) -> dict[str, object]:
    """Builds the library.

    Args:
        root: the folder that holds `custom_ops/`.
        target: the file to write.
        variant: "asan" (AddressSanitizer and UBSan), "tsan"
            (ThreadSanitizer) or "coverage" (gcov), which build without CUDA.

    Returns:
        The contents of `_build_info.py`.

    Raises:
        toolchain.BuildError: something is missing or does not compile, or
            there is no such variant.
    """
    if variant and variant not in VARIANTS:
        raise toolchain.BuildError(
            f"TFDIST_VARIANT must be one of {', '.join(VARIANTS)} or unset. "
            f"Received: {variant}"
        )
    tools = toolchain.find(root / "build")
    cuda_sources = sorted((root / "custom_ops").rglob("*.cu.cc"))
    cuda = bool(tools.nvcc and cuda_sources and not variant)
    print(f"tfdist_ext: CUDA kernels: {_yes_or_no(tools, cuda, variant)}")
    try:
        flags = _build(tools, root, target, cuda, variant)
    except toolchain.BuildError as error:
        if not cuda or os.environ.get("TFDIST_CUDA") == "1":
            raise
        print(f"{error}tfdist_ext: CUDA kernels failed, building without")
        cuda = False
        flags = _build(tools, root, target, cuda, variant)
    return {
        "TENSORFLOW_VERSION": tools.tensorflow.minor,
        "TENSORFLOW_BUILT_WITH": tools.tensorflow.version,
        "CUDA": cuda,
        "COMPILE_FLAGS": " ".join(flags),
    }


def _yes_or_no(tools: toolchain.Toolchain, cuda: bool, variant: str) -> str:
    if cuda:
        return f"yes ({tools.cuda_reason})"
    if variant:
        return f"no ({variant} build)"
    return f"no ({'no sources' if tools.nvcc else tools.cuda_reason})"


def _build(
    tools: toolchain.Toolchain,
    root: pathlib.Path,
    target: pathlib.Path,
    cuda: bool,
    variant: str,
) -> list[str]:
    """Compiles and links; returns the flags that do not name a folder."""
    name = variant or ("cuda" if cuda else "cpu")
    folder = root / "build" / f"ops-{tools.tensorflow.version}-{name}"
    kind = [*DEBUG, *VARIANTS[variant]] if variant else OPTIMIZE
    own = ["-std=c++17", "-fPIC", *kind]
    if cuda:
        own += ["-DTFDIST_CUDA=1"]
        where = [f"-isystem{_cuda_home(tools) / 'include'}"]
    else:
        where = []
    own += shlex.split(os.environ.get("CXXFLAGS", ""))
    commands = {}
    if cuda:
        for source in sorted((root / "custom_ops").rglob("*.cu.cc")):
            output = folder / source.relative_to(root).with_suffix(".o")
            commands[output] = _nvcc_command(tools, root, source, output)
    for output, source in _cxx_sources(root, folder, cuda).items():
        commands[output] = _cxx_command(
            tools, root, source, output, [*where, *own]
        )
    if not commands:
        raise toolchain.BuildError(f"no sources under {root / 'custom_ops'}")
    _compile_all(commands)
    _link(tools, list(commands), target, cuda, variant)
    return own


def _cxx_sources(
    root: pathlib.Path, folder: pathlib.Path, cuda: bool
) -> dict[pathlib.Path, pathlib.Path]:
    """Returns objects and their sources: functors, then a unit per folder."""
    found: dict[pathlib.Path, pathlib.Path] = {}
    units: dict[pathlib.Path, list[str]] = {}
    together = os.environ.get("TFDIST_UNITS") != "0"
    for source in sorted((root / "custom_ops").rglob("*.cc")):
        path = source.relative_to(root)
        if path.name.endswith(".cu.cc"):
            continue
        if path.name.endswith(GPU_KERNELS) and not cuda:
            continue
        if path.name.endswith(FUNCTORS) or not together:
            found[folder / path.with_suffix(".o")] = source
        else:
            unit = folder / path.parent.with_suffix(".cc")
            units.setdefault(unit, []).append(f'#include "{path}"\n')
    # The longest first: no core is left with one at the end.
    for unit, lines in sorted(units.items(), key=lambda item: -len(item[1])):
        text = "".join(lines)
        if not unit.exists() or unit.read_text() != text:
            unit.parent.mkdir(parents=True, exist_ok=True)
            unit.write_text(text)
        found[unit.with_suffix(".o")] = unit
    return found


def _cxx_command(
    tools: toolchain.Toolchain,
    root: pathlib.Path,
    source: pathlib.Path,
    output: pathlib.Path,
    flags: list[str],
) -> list[str]:
    # TensorFlow's headers as system headers: their warnings are not ours.
    theirs = [
        "-isystem" + flag[2:] if flag.startswith("-I") else flag
        for flag in tools.compile_flags
    ]
    return [
        *tools.cxx,
        *theirs,
        f"-I{root}",
        *WARNINGS,
        *flags,
        *("-MMD", "-MP", "-MF", str(output.with_suffix(".d"))),
        *("-c", str(source), "-o", str(output)),
    ]


def _nvcc_command(
    tools: toolchain.Toolchain,
    root: pathlib.Path,
    source: pathlib.Path,
    output: pathlib.Path,
) -> list[str]:
    assert tools.nvcc is not None
    theirs = [f for f in tools.compile_flags if not f.startswith("--std")]
    return [
        *tools.nvcc,
        *theirs,
        f"-I{root}",
        *(
            "-std=c++17",
            "-O3",
            "-DNDEBUG",
            "-DTFDIST_CUDA=1",
        ),
        *("-x", "cu", "--expt-relaxed-constexpr", "-cudart=static"),
        *("-Xcompiler", "-fPIC,-fno-math-errno", "-ccbin", tools.cxx[0]),
        *toolchain.CUDA_FLAGS,
        *shlex.split(os.environ.get("NVCCFLAGS", "")),
        *("-MMD", "-MF", str(output.with_suffix(".d"))),
        *("-c", str(source), "-o", str(output)),
    ]


def _cuda_home(tools: toolchain.Toolchain) -> pathlib.Path:
    """The toolkit's folder, which nvcc itself knows (it may be a wrapper)."""
    assert tools.nvcc is not None
    done = subprocess.run(
        [*tools.nvcc, "--dryrun", "-c", "-x", "cu", os.devnull],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    for line in done.stderr.splitlines():
        if "TOP=" in line:
            return pathlib.Path(line.split("TOP=", 1)[1].strip()).resolve()
    return pathlib.Path(tools.nvcc[0]).resolve().parent.parent


def _compile_all(commands: dict[pathlib.Path, list[str]]) -> None:
    stale = {o: c for o, c in commands.items() if not _up_to_date(o, c)}
    jobs = int(os.environ.get("TFDIST_JOBS", "2"))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(_compile, o, c) for o, c in stale.items()]
        try:
            for run in concurrent.futures.as_completed(runs):
                run.result()
        except toolchain.BuildError:
            pool.shutdown(cancel_futures=True)
            raise


def _compile(output: pathlib.Path, command: list[str]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    stamp = output.with_suffix(".cmd")
    stamp.unlink(missing_ok=True)
    source = command[command.index("-c") + 1]
    print(
        f"tfdist_ext: compiling {os.path.relpath(source)}\n", end="", flush=True
    )
    _run(command)
    stamp.write_text(shlex.join(command))


def _up_to_date(output: pathlib.Path, command: list[str]) -> bool:
    stamp, depends = output.with_suffix(".cmd"), output.with_suffix(".d")
    if not (output.exists() and stamp.exists() and depends.exists()):
        return False
    if stamp.read_text() != shlex.join(command):
        return False
    built = output.stat().st_mtime
    rule = depends.read_text().replace("\\\n", " ").splitlines()[0]
    headers = map(pathlib.Path, rule.split(":", 1)[1].split())
    return all(h.exists() and h.stat().st_mtime <= built for h in headers)


def _link(
    tools: toolchain.Toolchain,
    objects: list[pathlib.Path],
    target: pathlib.Path,
    cuda: bool,
    variant: str,
) -> None:
    command = [
        *tools.cxx,
        "-shared",
        *VARIANTS.get(variant, []),
        *map(str, objects),
        *shlex.split(os.environ.get("LDFLAGS", "")),
    ]
    if cuda:
        # Before TensorFlow, which has functions of the same names, and not for
        # others to find: those would ask for TensorFlow's version of CUDA.
        command += [f"-L{_cuda_home(tools) / 'lib64'}", "-lcudart_static"]
        command += ["-Wl,--exclude-libs,libcudart_static.a"]
        command += ["-lrt", "-ldl", "-lpthread"]
    _run([*command, *tools.link_flags, "-o", str(target)])


def _run(command: list[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=3600, check=False
    )
    if done.returncode:
        raise toolchain.BuildError(
            f"this command failed ({done.returncode}):\n"
            f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        )
    if done.stderr:
        print(done.stderr, flush=True)
