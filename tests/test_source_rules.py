# SPDX-License-Identifier: Apache-2.0
"""Rules of this source tree, as tests. A message says what to do instead."""

import ast
import graphlib
import importlib
import pathlib
import re
import subprocess
import sys

import pytest

from tests.packages import PACKAGES
from tests.packages import PUBLIC
from tests.packages import WITHOUT_TENSORFLOW
from tests.source_files import COMMENT
from tests.source_files import PACKAGE
from tests.source_files import ROOT
from tests.source_files import imported_modules
from tests.source_files import sources
from tests.source_files import texts
from tests.source_files import tracked

SPDX = "SPDX-License-Identifier: Apache-2.0"
MACHINE = re.compile(
    r"(?<![\w.])/(?:home|root|work|Users)/\w|/tmp/\w+/|"
    r"--(?:extra-)?index-url|https?://\S+/simple\b"
)
UNFINISHED = re.compile(
    r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError\(\)|not implemented yet"
)


def imports_between_files() -> dict[str, set[str]]:
    """What every module of the package imports of it, by dotted names."""
    texts = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py" and path.parent != PACKAGE.parent
    }
    found: dict[str, set[str]] = {}
    for module, text in texts.items():
        found[module] = set()
        for name in imported_modules(text):
            while name and name not in texts:
                name = name.rpartition(".")[0]
            if name:
                found[module].add(name)
    return found


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_imports_between_packages_only_go_down() -> None:
    imports = imports_between_files()
    top = {"_build_info"}  # of the package itself
    assert {package_of(module) for module in imports} - top == set(PACKAGES)
    order = list(PACKAGES)
    for package, below in PACKAGES.items():
        assert all(
            order.index(each) < order.index(package) for each in below
        ), f"{package} may not import a package after it"
    used: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for module, others in imports.items():
        package = package_of(module)
        if package in top:
            continue
        used[package] |= {package_of(other) for other in others} - {package}
    assert used == PACKAGES, (
        "PACKAGES lists what each package imports; keep it short"
    )


def test_no_import_runs_in_a_circle() -> None:
    imports = imports_between_files()
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        pytest.fail(f"Cut this circle of imports: {error.args[1]}")


def modules_of(part: str) -> list[pathlib.Path]:
    file = (PACKAGE / part).with_suffix(".py")
    found = [file] if file.exists() else list((PACKAGE / part).rglob("*.py"))
    assert found, part
    return found


@pytest.mark.parametrize("package", WITHOUT_TENSORFLOW)
def test_packages_without_tensorflow(package: str) -> None:
    for path in modules_of(package):
        for name in imported_modules(path.read_text()):
            assert name.split(".")[0] not in ("tensorflow", "keras"), path


def test_only_ops_know_the_shared_library() -> None:
    users = {
        str(path)
        for path, text in texts(sources()).items()
        if path.parts[0] == "tfdist_ext" and "load_op_library" in text
    }
    assert users <= {"tfdist_ext/ops/library.py"}


def test_one_object_has_the_state_of_a_thread() -> None:
    users = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if "threading.local" in path.read_text()
    }
    assert users == {"thread_context.py"}


def test_only_marks_spells_attributes_set_on_other_objects() -> None:
    spelled = re.compile(r"\b_tfdist_(?!ops(_tf\w*)?\b)\w+")
    wrong = [
        f"{path}: {match.group()}"
        for path, text in texts(sources()).items()
        if path.suffix == ".py"
        and path != pathlib.Path("tfdist_ext/marks.py")
        and path != pathlib.Path("tests/test_source_rules.py")
        for match in spelled.finditer(text)
    ]
    assert not wrong, "Add an accessor to tfdist_ext/marks.py and use it"


def test_doc_strings_are_no_fragments() -> None:
    fragment = re.compile(
        "(?:Of|For|As|At|By|On|From|To|In|With|Per|Around|And|But) "
    )
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    wrong = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, kinds)
        and fragment.match(text := ast.get_docstring(node) or "")
    ]
    assert not wrong, "Begin with a noun or a verb: who or what does what"


def test_every_source_names_its_licence_first() -> None:
    wrong = []
    for path, text in texts(sources()).items():
        lines = text.splitlines()[:2]
        expected = f"{COMMENT[path.suffix]} {SPDX}"
        first = lines[1:] if lines and lines[0].startswith("#!") else lines
        if first[:1] != [expected]:
            wrong.append(str(path))
    assert not wrong, f"The first line must be '... {SPDX}'"


def test_nothing_names_this_machine() -> None:
    wrong = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text()
        except UnicodeDecodeError:
            continue
        if path != pathlib.Path("tests/test_source_rules.py"):
            wrong += [f"{path}: {m.group()}" for m in MACHINE.finditer(text)]
    assert not wrong, "Neither paths of a machine nor package index addresses"


def test_nothing_is_left_unfinished() -> None:
    wrong = [
        f"{path}: {match.group()}"
        for path, text in texts(sources()).items()
        if path != pathlib.Path("tests/test_source_rules.py")
        for match in UNFINISHED.finditer(text)
    ]
    assert not wrong, "Finish it, or open an issue and leave no mark"


def test_no_line_is_longer_than_80_columns() -> None:
    wrong = [
        f"{path}:{number}"
        for path, text in texts(sources()).items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > 80 and "http" not in line
    ]
    assert not wrong


def test_files_and_functions_are_short() -> None:
    wrong = []
    for path, text in texts(sources()).items():
        if text.count("\n") > 600:
            wrong.append(f"{path} has more than 600 lines")
        if path.suffix == ".py":
            wrong += [
                f"{path}:{node.lineno} {node.name} has more than 60 lines"
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef)
                and (node.end_lineno or 0) - node.lineno >= 60
            ]
    assert not wrong, "Split it along what it does"


def test_no_catch_all_file() -> None:
    wrong = [
        str(path)
        for path in sources()
        if re.search(r"(^|_)(utils?|helpers?|misc|manager)(_|$)", path.stem)
    ]
    assert not wrong, "Name a file after what it holds"


def test_init_files_only_re_export() -> None:
    """Imports, `__all__`, and module hooks that import lazily."""
    wrong = []
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if not is_re_export(node):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def is_re_export(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):  # The doc-string.
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target]
        )
        return [ast.unparse(t) for t in targets] == ["__all__"]
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(
            map(is_re_export, node.body)
        )
    return isinstance(node, ast.FunctionDef) and node.name in (
        "__getattr__",
        "__dir__",
    )


def test_plans_are_made_without_tensorflow() -> None:
    names = PUBLIC["tfdist_ext"]
    loading = {"HybridParallelStrategy", "layers", "losses", "optimizers"}
    loading |= {"measure_machine", "export", "apply_delta", "export_delta"}
    loading |= {"scaled_rate", "callbacks", "data", "metrics"}
    loading |= {"export_onnx", "export_safetensors", "load_safetensors"}
    program = (
        "import sys, tfdist_ext\n"
        f"for name in {sorted(names - loading)}: getattr(tfdist_ext, name)\n"
        "assert 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_means_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert set(module.__all__) == PUBLIC[name], (
        "PUBLIC lists what users may use"
    )
    assert PUBLIC[name] <= set(dir(module))
    for public in module.__all__:
        exported = getattr(module, public)
        assert exported.__doc__, f"{name}.{public} needs a doc-string"
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_headers_are_named_by_their_paths() -> None:
    """One way to include our own headers, and one to guard them."""
    sources = [
        path
        for kind in ("*.h", "*.cc")
        for path in (ROOT / "custom_ops").rglob(kind)
    ]
    own = {path.name for path in sources}
    for path in sources:
        text, name = path.read_text(), str(path.relative_to(ROOT))
        for included in re.findall(r'^#include "([^"]+)"', text, re.M):
            folder, _, file = included.rpartition("/")
            if file in own and not folder.startswith("tensorflow"):
                assert (ROOT / included).exists(), (
                    f"{name}: include {file} by its path from the root"
                )
        if path.suffix == ".h":
            guard = f"TFDIST_{re.sub('[^A-Z0-9]', '_', name.upper())}_"
            found = re.search(r"#ifndef (\w+)\n#define (\w+)\n", text)
            assert found and set(found.groups()) == {guard}, (
                f"{name}: the guard is {guard}"
            )
