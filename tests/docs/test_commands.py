# SPDX-License-Identifier: Apache-2.0
"""Command lines of the documents are understood by what they start."""

import importlib
import re
import shlex

import pytest

from tests.docs import blocks
from tfdist_ext.launch import launch_options

MAKEFILE = (blocks.ROOT / "Makefile").read_text()
SETTINGS = (blocks.ROOT / "pyproject.toml").read_text()
PACKAGES = (blocks.ROOT / "build_ops" / "system_packages.sh").read_text()
EXAMPLES = sorted((blocks.ROOT / "examples").glob("*.py"))


def commands(block: blocks.Block) -> list[str]:
    """The command lines of a shell block, without prompts and outputs."""
    lines = block.text.replace("\\\n", " ").splitlines()
    prompted = [line for line in lines if re.match(r"\w*\$ ", line)]
    found = [re.sub(r"^\w*\$ ", "", line) for line in prompted or lines]
    return [line for line in found if line and not line.startswith("#")]


def found_in_documents() -> list[tuple[str, str]]:
    return [
        (block.place, line)
        for name in blocks.documents()
        for block in blocks.blocks_of(name)
        if block.kind == "shell"
        for line in commands(block)
    ]


def found_in_examples() -> list[tuple[str, str]]:
    """Usage lines of the examples' doc-strings."""
    return [
        (path.name, match.group().replace("\\\n", " "))
        for path in EXAMPLES
        for match in re.finditer(
            r"^ *(tfdist-run|python) .*(\\\n.*)*", path.read_text(), re.M
        )
    ]


ALL = found_in_documents() + found_in_examples()


def check_make(words: list[str]) -> None:
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name}\s*\?=" if is_variable else rf"^{name}:"
        known = re.search(pattern, MAKEFILE, re.M)
        assert known or f"{name}=" in MAKEFILE, word


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "pytest"]:
        assert all((blocks.ROOT / word).exists() for word in words[2:]), words
    elif words[0] == "-m":
        parser = importlib.import_module(words[1]).make_parser()
        parser.parse_args([] if words[2:] == ["--help"] else words[2:])
    else:
        check_script(words)


def check_script(words: list[str]) -> None:
    """A script of this repository and its options, or one of the text."""
    script, *arguments = words
    if "/" not in script:
        assert re.fullmatch(r"\w+\.py", script)
        return
    path = blocks.ROOT / script
    sources = (
        path.read_text()
        + (blocks.ROOT / "examples" / "command_line.py").read_text()
    )
    for word in arguments:
        assert not word.startswith("--") or f'"{word}"' in sources, word


def check_launcher(words: list[str]) -> None:
    options = launch_options.parse(words)
    if not options.module:
        check_script([options.script, *options.arguments])


def check_pip(words: list[str]) -> None:
    """Installs this, its extras or the TensorFlow that it is developed on."""
    assert words[0] == "install"
    (default,) = re.findall(r"^TF_DEFAULT := (\S+)", MAKEFILE, re.M)
    for word in words[1:]:
        extra = re.fullmatch(r"\.\[([\w-]+)\]", word)
        if extra:
            assert re.search(rf"^{extra.group(1)} = \[", SETTINGS, re.M), word
        if word.startswith("tensorflow"):
            assert word == f"tensorflow=={default}"


def check_apt(words: list[str]) -> None:
    assert words[:2] == ["apt-get", "install"]
    assert all(word in PACKAGES for word in words[2:]), words


def check_release(words: list[str]) -> None:
    """A command of docs/releasing.md, of a program that is not ours."""
    assert words[0] in ("tag", "push", "-c", "check", "upload", "build", "run")
    if words[0] == "-c":
        assert words[1:] == ["SHA256SUMS"]
    elif words[0] == "build":
        assert (blocks.ROOT / "Dockerfile").exists()


def check_file(words: list[str]) -> None:
    """A file of this repository, or the folder that make wheels fills."""
    assert words == ["dist"] or (blocks.ROOT / words[0]).exists()


CHECKS = {
    "make": check_make,
    "python": check_python,
    ".venv/bin/python": check_python,
    "tfdist-run": check_launcher,
    "pip": check_pip,
    "sudo": check_apt,
    "bash": check_file,
    "cd": check_file,
    **dict.fromkeys(("docker", "git", "sha256sum", "twine"), check_release),
}


@pytest.mark.parametrize(("place", "command"), ALL)
def test_command_is_understood(place, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # with a file that the text speaks of
    (tmp_path / "hosts").write_text("node1 slots=4\n")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    program, *words = shlex.split(command, comments=True)
    CHECKS[program](words)


def test_commands_are_found():
    block = next(blocks.find("a.md", "    a$ make x \\\n      y\n    done\n"))
    assert commands(block) == ["make x    y"]
    assert len(ALL) > 25


@pytest.mark.parametrize(
    "command",
    [
        "make no_such_target",
        "tfdist-run --no-such-option train.py",
        "tfdist-run -n 2 examples/no_such_file.py",
        "python examples/ctr.py --no-such-option",
        "python -m benchmarks.run --no-such-option",
        "python -m pytest tests/no_such_folder",
        "pip install .[no_such_extra]",
        "bash no_such_file",
        "docker no_such_command",
        "unknown program",
    ],
)
def test_wrong_commands_are_found(command):
    program, *words = shlex.split(command)
    with pytest.raises((AssertionError, SystemExit, OSError, KeyError)):
        CHECKS[program](words)
