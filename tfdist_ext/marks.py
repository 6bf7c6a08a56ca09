# SPDX-License-Identifier: Apache-2.0
"""The attributes that this package sets on objects of TensorFlow and Keras.

Nobody else spells their names.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.tables.placement import ShardSpec


def set_shard_spec(variable: Any, spec: ShardSpec) -> None:
    """Says which part of a table TensorFlow's variable holds."""
    variable._tfdist_shard = spec


def shard_spec(variable: Any) -> ShardSpec | None:
    """What a variable (TensorFlow's or Keras's) holds, None if no shard."""
    for _ in range(2):
        # A distributed variable asks its value for what it has not itself,
        # and a summed one (a metric of tf_keras) gets that by an exchange.
        if variable is None or hasattr(type(variable), "_get_cross_replica"):
            return None
        if "_tfdist_shard" in getattr(variable, "__dict__", ()):
            break
        inner = value_of(variable)
        variable = None if inner is variable else inner
    return getattr(variable, "_tfdist_shard", None)


def set_gradient_spec(dense_shape: Any, spec: ShardSpec) -> None:
    """Says of which shard a gradient in IndexedSlices is.

    On its `dense_shape`: a tape sums the gradients of several lookups into
    new slices, but keeps the first `dense_shape`.
    """
    dense_shape._tfdist_shard = spec


def gradient_spec(slices: Any) -> ShardSpec | None:
    """The shard that IndexedSlices are the gradient of, None for no shard."""
    shape = getattr(slices, "dense_shape", None)
    return getattr(shape, "_tfdist_shard", None)


def set_unique(dense_shape: Any) -> None:
    """Says that rows which occur several times in a gradient are to be summed.

    On its `dense_shape`, as that of `set_gradient_spec`.
    """
    dense_shape._tfdist_unique = True


def is_unique(slices: Any) -> bool:
    """Whether `set_unique` was said of a gradient."""
    return hasattr(slices.dense_shape, "_tfdist_unique")


def set_collectives(variable: Any, collectives: Any) -> None:
    """Says which ranks a checkpoint gets the parts of a shard from."""
    variable._tfdist_collectives = collectives


def collectives_of_shard(variable: Any) -> Any:
    """What `set_collectives` said, None of what is no shard."""
    return getattr(variable, "_tfdist_collectives", None)


def set_part_of_index(holder: Any, index: str) -> None:
    """Says that what an index holds is a part, whose rest is on other ranks."""
    holder._tfdist_part_of_index = index


def part_of_index(holder: Any) -> str | None:
    """The name of the index that `set_part_of_index` said, else None."""
    return getattr(holder, "_tfdist_part_of_index", None)


def set_own_optimizer(variable: Any, optimizer: Any) -> None:
    """Says that an optimizer of its own updates a table."""
    for component in _components(variable):
        component._tfdist_optimizer = optimizer


def _components(variable: Any) -> list[Any]:
    """TensorFlow's variable, and what it consists of where it is mirrored."""
    native = value_of(variable)
    strategy = getattr(native, "distribute_strategy", None)
    if strategy is None:
        return [native]
    return [native, *strategy.experimental_local_results(native)]


def _said_of(variable: Any, name: str) -> Any:
    """An attribute of TensorFlow's variable, None where it has none."""
    native = value_of(variable)
    if isinstance(native, tf.distribute.DistributedValues):
        # It would be read, by ops of a step, for what it has not itself.
        holders = (native, *native.values)
        return next((vars(h)[name] for h in holders if name in vars(h)), None)
    return getattr(native, name, None)


def own_optimizer(variable: Any) -> Any:
    """The optimizer of a table that has one for itself, else None."""
    return _said_of(variable, "_tfdist_optimizer")


def set_max_norm(variable: Any, max_norm: float) -> None:
    """Says how long the rows of a table may be."""
    for component in _components(variable):
        component._tfdist_max_norm = max_norm


def max_norm(variable: Any) -> float | None:
    """What `set_max_norm` said of a table, None of others."""
    return _said_of(variable, "_tfdist_max_norm")


def works_over_ranks(optimizer: type[Any]) -> type[Any]:
    """Says that the options of an optimizer's class mean whole tables."""
    optimizer._tfdist_row_updates = True
    return optimizer


def does_work_over_ranks(optimizer: Any) -> bool:
    """Whether `works_over_ranks` was said of the class of an optimizer."""
    return getattr(optimizer, "_tfdist_row_updates", False)


def set_element_wise(optimizer: type[Any]) -> None:
    """Says that an optimizer's class updates every element by itself."""
    optimizer._tfdist_element_wise = True


def is_element_wise(optimizer: type[Any]) -> bool:
    """Whether `set_element_wise` was said of a class, not of its bases."""
    return "_tfdist_element_wise" in vars(optimizer)


def set_exported(model: Any, exported: Any) -> None:
    """Says what a model was when it was last exported for deltas."""
    object.__setattr__(model, "_tfdist_exported", exported)


def exported(model: Any) -> Any:
    """What `set_exported` said of a model, None if nothing."""
    return vars(model).get("_tfdist_exported")


def set_update_watch(model: Any, watch: Any) -> None:
    """Says what watches the updates of a model while it is fitted, or None."""
    object.__setattr__(model, "_tfdist_update_watch", watch)


def update_watch(model: Any) -> Any:
    """What `set_update_watch` said of a model, None if nothing."""
    return vars(model).get("_tfdist_update_watch")


def set_dependence(value: Any, kind: str) -> None:
    """Says how a tensor depends on the batch.

    Args:
        value: a tensor of a step.
        kind: a constant of `batches.dependence`: SAME, MEAN, SUM or ROWS.
    """
    value._tfdist_dependence = kind


def dependence(value: Any) -> str | None:
    """What `set_dependence` said of a tensor, None if nothing."""
    return getattr(value, "_tfdist_dependence", None)


def set_per_rank(handle: Any) -> None:
    """Says that every rank has a value of its own in a variable.

    Args:
        handle: of a variable of TensorFlow.
    """
    handle._tfdist_per_rank = True


def is_per_rank(handle: Any) -> bool:
    """Whether `set_per_rank` was said of a handle."""
    return hasattr(handle, "_tfdist_per_rank")


def set_reduced(value: Any) -> None:
    """Says that a tensor is that of the whole batch, equal on all ranks."""
    value._tfdist_reduced = True


def is_reduced(value: Any) -> bool:
    """Whether `set_reduced` was said of a tensor."""
    return hasattr(value, "_tfdist_reduced")


def set_named(variable: Any) -> None:
    """Says that the log has named a variable that steps assign."""
    variable._tfdist_named = True


def is_named(variable: Any) -> bool:
    """Whether `set_named` was said of a variable."""
    return "_tfdist_named" in vars(variable)


def set_result_of(value: Any, metric: Any, index: int) -> None:
    """Says that a tensor is a metric's result.

    Args:
        value: the tensor.
        metric: whose result, by the samples of this rank.
        index: of the tensor in a result of several.
    """
    value._tfdist_result_of = (metric, index)


def result_of(value: Any) -> tuple[Any, int] | None:
    """What `set_result_of` said of a tensor, None of others."""
    return getattr(value, "_tfdist_result_of", None)


def set_own_part(value: Any, part: Any) -> None:
    """Says what this rank has given to a gradient of the whole batch."""
    value._tfdist_own_part = part


def own_part(value: Any) -> Any:
    """What `set_own_part` said of a tensor, None of others."""
    return getattr(value, "_tfdist_own_part", None)


def set_distributed(dataset: Any, samples: int) -> None:
    """Says that a dataset gives this rank's batches, and is not cut again.

    Args:
        dataset: of the rank.
        samples: of a batch, 0 if not known.
    """
    dataset._tfdist_distributed = True
    dataset._tfdist_samples = samples


def samples_of(dataset: Any) -> int:
    """What `set_distributed` said of a dataset's batches."""
    return int(getattr(dataset, "_tfdist_samples", 0))


def is_distributed(dataset: Any) -> bool:
    """Whether `set_distributed` was said of a dataset."""
    return getattr(dataset, "_tfdist_distributed", False)


def set_watch(dataset: Any, watch: Any) -> None:
    """Says who wants to know of the iterators of a dataset."""
    dataset._tfdist_watch = watch


def watch(dataset: Any) -> Any:
    """Who wants to know of the iterators of a dataset, None for nobody."""
    return getattr(dataset, "_tfdist_watch", None)


def set_assembly(parts: Any, assemble: Any) -> None:
    """Says how values of its own are made into those that are written.

    Args:
        parts: a tensor that nobody changes.
        assemble: takes it, returns what is written. Holds no reference to it.
    """
    parts._tfdist_assembly = assemble


def assembly(parts: Any) -> Any:
    """What `set_assembly` said, None of values that are written as they are."""
    return getattr(parts, "_tfdist_assembly", None)


def keep(graph: Any, other: Any) -> None:
    """Keeps another graph for as long as a graph is there.

    TensorFlow forgets the functions of a graph (the branches of a `tf.cond`)
    with it; a copy of its ops still calls them.
    """
    graph._tfdist_kept = [*getattr(graph, "_tfdist_kept", ()), other]


def fix(variable: Any) -> None:
    """Says that a graph or a slot relies on where a table's parts lie."""
    value_of(variable)._tfdist_fixed = True


def is_fixed(variable: Any) -> bool:
    """Whether a table's parts must stay where they are."""
    return bool(_said_of(variable, "_tfdist_fixed"))


def set_keys(variable: Any, keys: Any) -> None:
    """Says which keys have the rows of a table whose vocabulary grows."""
    value_of(variable)._tfdist_keys = keys


def keys_of(variable: Any) -> Any:
    """What `set_keys` said of a table, None of others."""
    return _said_of(variable, "_tfdist_keys")


def set_grows(variable: Any) -> None:
    """Says that a whole table, or slot, may be restored from one of fewer rows.

    Args:
        variable: of TensorFlow.
    """
    variable._tfdist_grows = True


def grows(variable: Any) -> bool:
    """Whether `set_grows` was said of a variable."""
    return getattr(variable, "_tfdist_grows", False)


def set_slicing(saved: Any, slicing: Any) -> None:
    """Says how an object that grows is read of a smaller checkpoint.

    Args:
        saved: a variable, or another object that is saved in slices.
        slicing: maps a shape in the file to the slice that is read.
    """
    saved._tfdist_slicing = slicing


def slicing(saved: Any) -> Any:
    """What `set_slicing` said, None of what does not grow."""
    return getattr(saved, "_tfdist_slicing", None)
