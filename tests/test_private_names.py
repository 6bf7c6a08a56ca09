# SPDX-License-Identifier: Apache-2.0
"""Private TensorFlow and private Keras are used in a file each, and listed."""

import ast
import pathlib
import re

import pytest

from tests.source_files import PACKAGE
from tests.source_files import ROOT
from tests.source_files import imported_modules
from tests.source_files import texts
from tests.source_files import tracked

# Names that `marks` sets are ours.
PRIVATE_NAME = re.compile("_(?!tfdist_)[a-z]")
PRIVATE = pathlib.Path("tfdist_ext/tensorflow_internals.py")

# What is used of TensorFlow's private modules. Every new release may break
# these, so the list should shrink, and a new entry needs a reason in PRIVATE.
PRIVATE_MODULES = {
    "tensorflow.python.autograph.impl.conversion",
    "tensorflow.python.checkpoint.functional_saver",
    "tensorflow.python.data.experimental.ops.distribute",
    "tensorflow.python.data.ops.cache_op",
    "tensorflow.python.data.ops.interleave_op",
    "tensorflow.python.data.ops.prefetch_op",
    "tensorflow.python.distribute.collective_all_reduce_strategy",
    "tensorflow.python.distribute.distribute_lib",
    "tensorflow.python.distribute.values",
    "tensorflow.python.eager.context",
    "tensorflow.python.eager.record",
    "tensorflow.python.ops.control_flow_util",
    "tensorflow.python.ops.resource_variable_ops",
    "tensorflow.python.saved_model.save",
    "tensorflow.python.training.saving.saveable_object",
    "tensorflow.python.types.internal",
}

# What is used of Keras's private names, in two files: of its loops and layers,
# and of losses, metrics and optimizers. (`_built` too,
# which our optimizers set themselves.)
PRIVATE_KERAS = {
    "_allow_sum_over_batch_size",
    "_compile_config",
    "_compile_loss",
    "_conform_to_outputs",
    "_current_epoch",
    "_deferred_initialize",
    "_distributed_dataset",
    "_distribution_strategy",
    "_first_batches",
    "_fn_kwargs",
    "_flat_losses",
    "_flatten_layers",
    "_initial_epoch",
    "_initialize",
    "_keras_mask",
    "_last_batch_seen",
    "_load_model",
    "_log_weights",
    "_losses",
    "_maybe_symbolic_build",
    "_metrics",
    "_model_variables_moving_average",
    "_moments",
    "_multi_worker_concat",
    "_prev_training_metadata_path",
    "_prev_weights_path",
    "_random_generator",
    "_save_checkpoint",
    "_save_model",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
    "_scratch_graph",
    "_should_save_model",
    "_steps_per_execution",
    "_support_zero_size_input",
    "_trainable_variables",
    "_training_metadata_path",
    "_training_state",
    "_update_model_variables_moving_average",
    "_use_cached_eval_dataset",
    "_value",
    "_weights_path",
}
# Private names of others that cannot be fenced, by package.
PRIVATE_ELSEWHERE = {
    "callbacks": {"_exit"},  # of os
    "launch": {"_exit"},  # of os
    # Whether a variable is one that is read by an exchange.
    "marks": {"_get_cross_replica"},
    # What subclasses of Keras's optimizers find in themselves, and the parts
    # of an update with accumulated gradients.
    "optimizers": {
        "_accumulated_gradients",
        "_backend_update_step",
        "_distribution_strategy",
        "_get_current_learning_rate",
        "_get_variable_index",
        "_index_dict",
        "_iterations",
        "_model_variables_moving_average",
        "_momentums",
        "_shared_name",
        "_use_weight_decay",
        "_var_key",
        "_velocities",
        "_velocity_hats",
    },
    # TensorFlow's way for a variable to save itself by its own rules.
    "embedding": {"_restore_from_tensors", "_serialize_to_tensors"},
    # TensorFlow's savers and managers of checkpoints, which are wrapped.
    "saving": {
        "_distribute_strategy",
        "_distributed_variable",
        "_get_shards_by_task",
        "_graph_view",
        "_keys_to_restore_fn",
        "_last_preserved_timestamp",
        "_maybe_delete",
        "_mirrored_variable",
        "_num_unique_tasks",
        "_record_state",
        "_restore_fn_to_keys",
        "_restore_from_tensors",
        "_saver",
        "_shardable_tensors_by_task",
        "_sweep",
        "_sync_on_read_variable",
        "_tensor",
        "_tensor_save_spec",
        "_trackable",
        "_var_list",
    },
    # What a subclass of TensorFlow's strategy finds in itself.
    "strategy": {
        "_container_strategy",
        "_make_input_context",
    },
}
# Names of others that the package defines as well: tests may set theirs.
NOT_OURS = {
    "TensorFlow, which asks variables for what they save": {
        "_serialize_to_tensors",
    },
    "TensorFlow, which asks a strategy for its devices": {
        "_initialize_local_devices",
    },
}
# Private methods of Keras that our subclasses of its optimizers override.
OVERRIDDEN = {
    "_all_reduce_sum_gradients",
    "_apply_weight_decay",
    "_backend_apply_gradients",
    "_clip_gradients",
    "_compute_current_learning_rate",
    "_deduplicate_sparse_grad",
    "_distributed_apply_gradients_fn",
    "_distributed_tf_update_step",
    "_internal_apply_gradients",
    "_overwrite_model_variables_with_average_value",
}


def private_modules(text: str) -> set[str]:
    return {
        name
        for name in imported_modules(text)
        if name.startswith("tensorflow.python")
    }


def test_private_tensorflow_is_used_in_one_file() -> None:
    package = [
        p for p in tracked() if p.parts[0] == "tfdist_ext" and p.suffix == ".py"
    ]
    users = {
        str(path)
        for path, text in texts(package).items()
        if "tensorflow.python" in text
    }
    assert users <= {str(PRIVATE)}, (
        f"Only {PRIVATE} may import tensorflow.python: use a public API, or "
        "add what you need there."
    )


def test_private_tensorflow_is_listed() -> None:
    used = private_modules((ROOT / PRIVATE).read_text())
    assert used == PRIVATE_MODULES, (
        "PRIVATE_MODULES of this test lists what is used; keep it in step, "
        "and short."
    )


def foreign_private_names() -> dict[str, set[str]]:
    """By package, the private names used that the package does not define."""
    trees = {
        path.relative_to(PACKAGE): ast.parse(path.read_text())
        for path in PACKAGE.rglob("*.py")
    }
    own: set[str] = set()
    for tree in trees.values():
        own |= set(map(defined_name, ast.walk(tree)))
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        names = set(map(used_name, ast.walk(tree)))
        private = {name for name in names if PRIVATE_NAME.match(name)} - own
        found.setdefault(path.with_suffix("").parts[0], set()).update(private)
    return found


def defined_name(node: ast.AST) -> str:
    """What a statement defines: a function, a class, an attribute of self."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    of_self = isinstance(node, ast.Attribute) and (
        isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    )
    return node.attr if of_self else ""


def used_name(node: ast.AST) -> str:
    """An attribute, a string that may be the name of one, or an argument."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.keyword):
        return node.arg or ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value if node.value.isidentifier() else ""
    return ""


def test_private_keras_is_listed_and_in_one_file() -> None:
    found = foreign_private_names()
    del found["tensorflow_internals"]
    used = {package: names for package, names in found.items() if names}
    known = used.pop("keras_internals")
    assert known == PRIVATE_KERAS
    assert used == PRIVATE_ELSEWHERE, (
        "Add a function to keras_internals.py for what is private in Keras, "
        "or the name to the list, with a reason"
    )


def own_private_names() -> set[str]:
    """What the package defines for itself, in a module or in a class."""
    own: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            targets = node.targets if isinstance(node, ast.Assign) else []
            own |= {defined_name(node), *map(ast.unparse, targets)}
    return {name for name in own if re.match("_[a-zA-Z]", name)}


def test_programs_do_not_reach_into_private_names() -> None:
    own = own_private_names() - set().union(*NOT_OURS.values())
    reached = re.compile(
        r"""(?:(?<!\bself)(?<!\bcls)\.|\bimport )(_[a-zA-Z]\w*)"""
        r"""|["'](_\w+)["']"""
    )
    paths = [p for p in tracked() if p.suffix == ".py"]
    wrong = [
        f"{path}: {name}"
        for path, text in texts(paths).items()
        if path.parts[0] in ("tests", "benchmarks", "examples")
        and path.name != pathlib.Path(__file__).name
        for name in map("".join, reached.findall(text))
        if name in own
    ]
    assert not wrong, "Test what users see, or make the name a public one"


def test_overridden_private_methods_of_keras_are_listed() -> None:
    theirs: set[str] = set()
    for name in ("keras", "tf_keras"):
        keras = pytest.importorskip(name)
        kinds = [keras.layers.Layer, *vars(keras.optimizers).values()]
        for kind in kinds:
            theirs |= set(dir(kind) if isinstance(kind, type) else ())
    ours = {
        node.name
        for package in ("optimizers", "layers")
        for path in (PACKAGE / package).glob("*.py")
        for kind in ast.walk(ast.parse(path.read_text()))
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.FunctionDef)
    }
    overridden = set(filter(PRIVATE_NAME.match, ours & theirs))
    assert overridden == OVERRIDDEN
