# SPDX-License-Identifier: Apache-2.0
"""Which scenarios there are.

A scenario is a function of a module of this folder that takes a strategy and a
folder. It runs on every rank of a pool and checks for itself.
"""

import ast
import pathlib

HERE = pathlib.Path(__file__).parent


def of(*modules: str) -> list[str]:
    """The scenarios of modules, as "module.function".

    Args:
        *modules: names of files of this folder, which are not imported.
    """
    found = [
        f"{module}.{node.name}"
        for module in modules
        for node in ast.parse((HERE / f"{module}.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
        and [arg.arg for arg in node.args.args] == ["strategy", "folder"]
    ]
    assert found, f"no scenarios in {modules}"
    return found


def without(scenarios: list[str], names: set[str]) -> list[str]:
    """All scenarios but those named.

    Args:
        scenarios: "module.function".
        names: of functions, all of which must be there.
    """
    assert names <= {s.split(".")[1] for s in scenarios}, names
    return [s for s in scenarios if s.split(".")[1] not in names]


def only(scenarios: list[str], names: set[str]) -> list[str]:
    """Scenarios of some names.

    Args:
        scenarios: "module.function".
        names: of functions, all of which must be there.
    """
    every = {s.split(".")[1] for s in scenarios}
    assert names <= every, names - every
    return without(scenarios, every - names)


def name_of_mode(value: object) -> str | None:
    """The id of a mode of `consistency` in the name of a test.

    Args:
        value: the class and its arguments, or another parameter of the test.
    """
    match value:
        case [str(name), dict(options)]:
            parts = {"outer", "tables", "row_cache", "stale_scale"}
            return "_".join([name, *sorted(parts & options.keys())])
    return None
