# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of Orbax, written and read by Keras 3 on several ranks.

Keras gives Orbax a tree of arrays by the paths of variables. Rank 0 gets whole
tables and writes them; every rank reads the tree and assigns its part.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist_ext import marks
from tfdist_ext import thread_context
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import whole_tables
from tfdist_ext.numbers import model_state
from tfdist_ext.saving import shared_files
from tfdist_ext.thread_context import current
from tfdist_ext.type_names import Callback
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import T

# Groups of Keras's tree.
_WEIGHTS = ("trainable_variables", "non_trainable_variables")
_OPTIMIZER = "optimizer_variables"
_METRICS = "metrics_variables"

# What this package adds: keys of a dynamic vocabulary, next to its table, and
# the variables of optimizers of single tables.
_VOCABULARY = ".vocabulary"
_TABLE_OPTIMIZERS = "tfdist_ext_table_optimizers"

_SEED = "seed_generator_state"
_NUMBER = r"(?:_\d+)?"

_Tree = dict[str, Any]
_Pairs = list[tuple[Any, np.ndarray]]


class _NoCheckpointer:
    """Takes what rank 0 writes on the other ranks, and writes nothing."""

    def save_checkpointables(self, step: int, payload: _Tree) -> bool:
        return True


def save(
    original: Original[None], callback: Callback, *args: Any, **kwargs: Any
) -> None:
    """Makes rank 0 write a checkpoint of whole tables; a joint call."""
    model = callback.model
    collectives = shared_files.end_round(model)
    with thread_context.setting(state_trees="saved"):
        if collectives is None:
            original(callback, *args, **kwargs)
            return
        model_state.compare_replicas(
            model_state.variables_of(model),
            collectives,
            f"before '{callback.directory}' is saved",
        )
        whole = functools.partial(
            whole_tables.gather_to_first, collectives=collectives
        )
        what = f"save an Orbax checkpoint to '{callback.directory}'"
        shards = shared_files.shards_of(model)
        with (
            shared_files.with_methods(shards, numpy=whole),
            collectives.joint_call(what, end_barrier=True),
            _writing_on_first(callback, collectives),
        ):
            original(callback, *args, **kwargs)


@contextlib.contextmanager
def _writing_on_first(
    callback: Callback, collectives: Collectives
) -> Iterator[None]:
    """Makes rank 0 write before the block ends, and the others not at all."""
    background = callback.save_on_background
    checkpointer = callback.checkpointer
    # All ranks wait for rank 0, so that they get its errors.
    callback.save_on_background = False
    if collectives.group.rank > 0:
        callback.checkpointer = _NoCheckpointer()
    try:
        yield
    finally:
        callback.save_on_background = background
        callback.checkpointer = checkpointer


def get_state_tree(
    original: Original[_Tree], model: Model, *args: Any, **kwargs: Any
) -> _Tree:
    """Adds what Keras does not know to the tree of a checkpoint.

    Before it loads a checkpoint, Keras makes a tree that it needs for JAX
    alone, and that it cannot make of a model that is not compiled.
    """
    if current.state_trees == "loaded" and _is_ours(model):
        return {}
    tree = original(model, *args, **kwargs)
    if current.state_trees != "saved":
        return tree
    for variable in _vocabularies(model):
        # As bytes, because Orbax refuses arrays without elements.
        file = io.BytesIO()
        np.savez(file, **marks.keys_of(variable).gathered())  # a joint call
        packed = np.frombuffer(file.getvalue(), np.uint8)
        _put(tree[_WEIGHTS[1]], f"{variable.path}{_VOCABULARY}", packed)
    for i, own in enumerate(_table_optimizers(model)):
        for variable in own.variables:
            path = f"{_TABLE_OPTIMIZERS}/{i}/{variable.path}"
            _put(tree[_OPTIMIZER], path, variable.numpy())
    return tree


def _is_ours(model: Model) -> bool:
    """Whether a model has a strategy of this package, or its vocabularies."""
    strategy = getattr(model, "distribute_strategy", None)
    return hasattr(strategy, "collectives") or bool(_vocabularies(model))


def _vocabularies(model: Model) -> list[Any]:
    """The tables of a model with dynamic vocabularies."""
    return [v for v in model.variables if marks.keys_of(v) is not None]


def _put(tree: _Tree, path: str, value: np.ndarray) -> None:
    *folders, name = path.split("/")
    for folder in folders:
        tree = tree.setdefault(folder, {})
    tree[name] = value


def _table_optimizers(model: Model) -> list[Optimizer]:
    """Optimizers of single tables that are not in the optimizer's variables."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if optimizer is None:
        return []
    known = {id(each) for each in optimizer.variables}
    return [
        own
        for own in getattr(inner, "table_optimizers", ())
        if not known & {id(each) for each in own.variables}
    ]


def reading(original: Original[T], *args: Any, **kwargs: Any) -> T:
    """Trees that Keras reads inside are of whole tables."""
    with thread_context.setting(state_trees="loaded"):
        return original(*args, **kwargs)


def set_state_tree(
    original: Original[None], model: Model, state_tree: _Tree
) -> None:
    """Assigns whole tables, and checks names, which Keras does not.

    Keras skips a variable whose path is not in the tree. Paths have the names
    of the model and of the optimizer, which Keras numbers.
    """
    if current.state_trees != "loaded" or not _is_ours(model):
        return original(model, state_tree)
    vocabularies = _vocabularies(model)
    collectives = shared_files.collectives_of(model)
    _build_optimizer(model, state_tree)
    stored: dict[str, np.ndarray] = {}
    for group in _WEIGHTS:
        stored |= _flat(state_tree.get(group, {}))
    keys = _taken(stored, vocabularies, model.name)
    pairs = _pairs_of_weights(stored, model)
    pairs += _pairs_of_optimizer(state_tree, model)
    pairs += _pairs_of_metrics(state_tree, model)
    _check_shapes(pairs)
    if collectives is not None:
        collectives.barrier("orbax/read")
    for variable, arrays in zip(vocabularies, keys, strict=True):
        marks.keys_of(variable).take(arrays)
    for variable, value in pairs:
        if marks.shard_spec(variable) is not None:
            whole_tables.assign_part(variable, value)
        else:
            variable.assign(value)
    return None


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = np.asarray(value)
    return found


def _build_optimizer(model: Model, tree: _Tree) -> None:
    """Makes the slots that the tree has; Keras would skip them."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or optimizer.built or not tree.get(_OPTIMIZER):
        return
    strategy = getattr(model, "distribute_strategy", None)
    with strategy.scope() if strategy else contextlib.nullcontext():
        optimizer.build(model.trainable_variables)


def _taken(
    stored: dict[str, np.ndarray], variables: Iterable[Any], model: str
) -> list[dict[str, np.ndarray]]:
    """Removes the keys of vocabularies from what is stored, and reads them."""
    by_name = {
        _without_model(path.removesuffix(_VOCABULARY), model): stored.pop(path)
        for path in list(stored)
        if path.endswith(_VOCABULARY)
    }
    found = []
    for variable in variables:
        packed = by_name.get(_without_model(variable.path, model))
        if packed is None:
            raise ValueError(
                f"Table '{variable.path}' has a dynamic vocabulary, and the "
                "Orbax checkpoint has no keys for it. Load a checkpoint that "
                "was saved of a model with this vocabulary."
            )
        with np.load(io.BytesIO(packed.tobytes())) as arrays:
            found.append(dict(arrays))
    return found


def _numbered(name: str) -> str:
    """A pattern of a name with any number that Keras adds to it."""
    return re.escape(re.sub(r"_\d+$", "", name)) + _NUMBER


def _without_model(path: str, model: str) -> str:
    return re.sub(f"^{_numbered(model)}/", "", path)


def _number_of(name: str) -> tuple[str, int]:
    """A name without the number that Keras adds to it, and the number."""
    digits = re.search(r"_(\d+)$", name)
    if digits is None:
        return name, 0
    return name[: digits.start()], int(digits[1])


def _match(
    stored: Mapping[str, np.ndarray],
    variables: Mapping[str, Any],
    short: Callable[[str], str],
) -> tuple[_Pairs, list[str], list[str]]:
    """Pairs variables with values of the same path, else of the same name.

    Args:
        stored: values by path.
        variables: variables by path.
        short: the name in a path, without what Keras numbers.

    Returns:
        Pairs, paths of other variables, and paths of other values.
    """
    pairs = [
        (variable, stored[path])
        for path, variable in variables.items()
        if path in stored
    ]
    missing = sorted(variables.keys() - stored.keys())
    unknown = sorted(stored.keys() - variables.keys())
    names = [short(path) for path in unknown]
    wanted = [short(path) for path in missing]
    left = []
    for path, name in zip(missing, wanted, strict=True):
        if names.count(name) == 1 and wanted.count(name) == 1:
            place = names.index(name)
            pairs.append((variables[path], stored[unknown[place]]))
            del names[place], unknown[place]
        else:
            left.append(path)
    return pairs, left, unknown


def _pairs_of_weights(stored: dict[str, np.ndarray], model: Model) -> _Pairs:
    variables = {v.path: v for v in model.variables}
    states = [_seeds(stored), _seeds(variables)]
    short = functools.partial(_without_model, model=model.name)
    pairs, missing, unknown = _match(stored, variables, short)
    if missing or unknown:
        raise ValueError(
            "The Orbax checkpoint is not of this model. Variables that it does "
            f"not have: {missing[:5]} ({len(missing)}). Arrays that the model "
            f"does not have: {unknown[:5]} ({len(unknown)}). Give the layers "
            "of both models the same names (argument `name`)."
        )
    values, owners = states
    if len(values) == len(owners):
        return pairs + list(zip(owners, values, strict=True))
    warnings.warn(
        f"The Orbax checkpoint has states of {len(values)} random generators, "
        f"and the model has {len(owners)}: none of them was loaded.",
        stacklevel=2,
    )
    return pairs


def _seeds(by_path: dict[str, Any]) -> list[Any]:
    """Removes the states of seeds, and returns them in Keras's numbering."""

    def number(path: str) -> tuple[str, int]:
        return _number_of(path.removesuffix(_SEED).rstrip("/"))

    paths = sorted((p for p in by_path if p.endswith(_SEED)), key=number)
    return [by_path.pop(path) for path in paths]


def _match_slots(
    stored: Mapping[str, np.ndarray], variables: Mapping[str, Any], model: str
) -> tuple[_Pairs, list[str], list[str]]:
    """Like `_match`, for an optimizer; its parts are in Keras's numbering."""
    there, here = _by_slot(stored, model), _by_slot(variables, model)
    pairs: _Pairs = []
    missing: list[str] = []
    unknown: list[str] = []
    for slot in sorted(there.keys() | here.keys()):
        values, owners = there.get(slot, []), here.get(slot, [])
        if len(values) == len(owners):
            pairs += [
                (variables[owner], stored[value])
                for owner, value in zip(owners, values, strict=True)
            ]
        else:
            missing += owners
            unknown += values
    return pairs, missing, unknown


def _by_slot(
    paths: Iterable[str], model: str
) -> dict[tuple[str, str], list[str]]:
    """Paths by the names of optimizer and slot, in the order of numbers."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(paths, key=lambda p: _number_of(p.partition("/")[0])):
        optimizer, _, slot = path.partition("/")
        slot = re.sub(f"^{_numbered(model)}_", "", slot)
        key = (_number_of(optimizer)[0], slot)
        found.setdefault(key, []).append(path)
    return found


def _pairs_of_optimizer(tree: _Tree, model: Model) -> _Pairs:
    optimizer = getattr(model, "optimizer", None)
    groups = dict(tree.get(_OPTIMIZER) or {})
    if optimizer is None or not groups:
        return []
    added = groups.pop(_TABLE_OPTIMIZERS, {})
    parts = [(_flat(groups), {v.path: v for v in optimizer.variables})]
    owns = _table_optimizers(model)
    for i in range(max(len(owns), len(added))):
        variables = owns[i].variables if i < len(owns) else []
        values = _flat(added.get(str(i), {}))
        parts.append((values, {v.path: v for v in variables}))
    pairs: _Pairs = []
    for stored, variables in parts:
        found, missing, unknown = _match_slots(stored, variables, model.name)
        if missing or unknown:
            warnings.warn(
                "The Orbax checkpoint has the state of another optimizer, "
                "which was not loaded. Variables that it does not have: "
                f"{missing[:5]} ({len(missing)}). Arrays that the optimizer "
                f"does not have: {unknown[:5]} ({len(unknown)}).",
                stacklevel=2,
            )
            return []
        pairs += found
    return pairs


def _pairs_of_metrics(tree: _Tree, model: Model) -> _Pairs:
    # Keras builds metrics with the first batch: those of other models may not
    # be there yet.
    stored = _flat(tree.get(_METRICS) or {})
    found = model.metrics_variables
    return [(v, stored[v.path]) for v in found if v.path in stored]


def _check_shapes(pairs: _Pairs) -> None:
    for variable, value in pairs:
        shape = tuple(variable.shape)
        spec = marks.shard_spec(variable)
        if spec is not None:
            shape = (spec.rows, spec.dim)[: len(shape)]
        if value.shape != shape:
            raise ValueError(
                f"Variable '{variable.path}' has shape {shape}, and shape "
                f"{value.shape} in the Orbax checkpoint. Make the model with "
                "the same shapes."
            )
