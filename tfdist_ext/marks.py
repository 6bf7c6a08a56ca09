# SPDX-License-Identifier: Apache-2.0
"""Attributes that this package sets on objects of TensorFlow and Keras.

No other module uses the names of these attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.keras_internals import value_of
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Metric
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Trackable
from tfdist_ext.type_names import Variable


def set_shard_spec(variable: tf.Variable, spec: ShardSpec) -> None:
    """Marks TensorFlow's variable as a shard, with its part of the table."""
    variable._tfdist_shard = spec


def shard_spec(variable: Variable | None) -> ShardSpec | None:
    """Shard spec of a variable of TensorFlow or Keras; None for others."""
    for _ in range(2):
        # A distributed variable reads its value to find an unknown attribute.
        # For a summed one (a metric of tf_keras) this is an exchange.
        if variable is None or hasattr(type(variable), "_get_cross_replica"):
            return None
        if "_tfdist_shard" in getattr(variable, "__dict__", ()):
            break
        inner = value_of(variable)
        variable = None if inner is variable else inner
    return getattr(variable, "_tfdist_shard", None)


def set_gradient_spec(dense_shape: tf.Tensor, spec: ShardSpec) -> None:
    """Marks IndexedSlices as the gradient of a shard.

    The mark is set on the `dense_shape`: a tape sums the gradients of several
    lookups into new slices, but reuses the first `dense_shape`.
    """
    dense_shape._tfdist_shard = spec


def gradient_spec(slices: TensorOrSlices) -> ShardSpec | None:
    """Shard spec of a gradient in IndexedSlices; None if it has none."""
    shape = getattr(slices, "dense_shape", None)
    return getattr(shape, "_tfdist_shard", None)


def set_deferred_rows(dense_shape: tf.Tensor, wire: object) -> None:
    """Marks a gradient of a shard that this rank has not sent to the owners.

    Its indices are rows of the entire table. The mark is set on the
    `dense_shape`, as by `set_gradient_spec`.

    Args:
        dense_shape: shape of the entire table.
        wire: the `Wire` in which the gradient is to be sent.
    """
    dense_shape._tfdist_deferred_rows = wire


def deferred_rows(slices: TensorOrSlices) -> Any:
    """Value of `set_deferred_rows` for a gradient; None for others."""
    shape = getattr(slices, "dense_shape", None)
    return getattr(shape, "_tfdist_deferred_rows", None)


def set_unique(dense_shape: tf.Tensor) -> None:
    """Marks a gradient whose duplicate rows must be summed.

    The mark is set on the `dense_shape`, as by `set_gradient_spec`.
    """
    dense_shape._tfdist_unique = True


def is_unique(slices: TensorOrSlices) -> bool:
    """Whether a gradient has the mark of `set_unique`."""
    return hasattr(slices.dense_shape, "_tfdist_unique")


def set_table_rows(slices: tf.IndexedSlices) -> None:
    """Marks the gradient of a table of this package.

    The values are marked, by which later ops are found, and the `dense_shape`;
    see `set_gradient_spec`.
    """
    slices.values._tfdist_table_rows = True
    slices.dense_shape._tfdist_of_table = True


def is_of_table(slices: tf.IndexedSlices) -> bool:
    """Whether a gradient has the mark of `set_table_rows`."""
    return hasattr(slices.dense_shape, "_tfdist_of_table")


def is_table_rows(tensor: tf.Tensor) -> bool:
    """Whether a tensor is the values of a gradient of a table."""
    return hasattr(tensor, "_tfdist_table_rows")


def set_at_owners(values: tf.Tensor) -> None:
    """Marks the values of a gradient whose rows only their owners compute."""
    values._tfdist_at_owners = True


def is_at_owners(values: tf.Tensor) -> bool:
    """Whether a tensor has the mark of `set_at_owners`."""
    return hasattr(values, "_tfdist_at_owners")


def set_row_counts(indices: tf.Tensor, counts: object) -> None:
    """Marks the rows of a gradient with how to count their samples.

    Args:
        indices: the tensor of the rows.
        counts: a `RowCounts`.
    """
    indices._tfdist_row_counts = counts


def row_counts(indices: tf.Tensor) -> Any:
    """Returns the `RowCounts` of a gradient's rows, or None."""
    return getattr(indices, "_tfdist_row_counts", None)


def set_row_source(
    indices: tf.Tensor, source: tf.Tensor, over_ranks: bool = False
) -> None:
    """Marks rows of a gradient with the rows that they were summed from.

    Args:
        indices: the tensor of the rows.
        source: the tensor of the rows before, in which a row may be repeated.
        over_ranks: whether the rows of all ranks were summed.
    """
    if indices is not source:
        indices._tfdist_row_source = (source, over_ranks)


def row_source(indices: tf.Tensor) -> tuple[tf.Tensor, bool] | None:
    """Returns the arguments of `set_row_source`, or None."""
    return getattr(indices, "_tfdist_row_source", None)


def set_samples_of_lists(
    rows: tf.Tensor, count: Callable[[], tf.Tensor]
) -> None:
    """Marks looked-up rows with how many samples each list stands for.

    Args:
        rows: the tensor of the rows that a lookup reads.
        count: a function that returns float32, a number for each list.
    """
    rows._tfdist_samples_of_lists = count


def samples_of_lists(rows: tf.Tensor) -> Callable[[], tf.Tensor] | None:
    """Returns the function of `set_samples_of_lists`, or None."""
    return getattr(rows, "_tfdist_samples_of_lists", None)


def set_list_length(row_splits: tf.Tensor, length: int) -> None:
    """Marks row splits of lists that all have this many ids."""
    row_splits._tfdist_list_length = length


def list_length(row_splits: tf.Tensor) -> int | None:
    """Value of `set_list_length` for row splits; None if it is not set."""
    return getattr(row_splits, "_tfdist_list_length", None)


def set_collectives(variable: Trackable, collectives: object) -> None:
    """Sets the collectives with which checkpoints read parts of a shard."""
    variable._tfdist_collectives = collectives


def collectives_of_shard(variable: Trackable) -> Any:
    """Value of `set_collectives`; None for an object that is not a shard."""
    return getattr(variable, "_tfdist_collectives", None)


def set_part_of_index(holder: Trackable, index: str) -> None:
    """Marks the data of an index as one part; other ranks have the rest."""
    holder._tfdist_part_of_index = index


def part_of_index(holder: Trackable) -> str | None:
    """Name of the index set by `set_part_of_index`, else None."""
    return getattr(holder, "_tfdist_part_of_index", None)


def set_own_optimizer(variable: Variable, optimizer: Optimizer) -> None:
    """Sets an optimizer that updates only this table."""
    for component in _components(variable):
        component._tfdist_optimizer = optimizer


def _components(variable: Variable) -> list[tf.Variable]:
    """TensorFlow's variable, and its components if it is mirrored."""
    native = value_of(variable)
    strategy = getattr(native, "distribute_strategy", None)
    if strategy is None:
        return [native]
    return [native, *strategy.experimental_local_results(native)]


def _mark_of(variable: Variable, name: str) -> Any:
    """An attribute of TensorFlow's variable; None if it is not set."""
    native = value_of(variable)
    if isinstance(native, tf.distribute.DistributedValues):
        # `getattr` would read the variable, by ops of a step.
        holders = (native, *native.values)
        return next((vars(h)[name] for h in holders if name in vars(h)), None)
    return getattr(native, name, None)


def own_optimizer(variable: Variable) -> Any:
    """The optimizer set by `set_own_optimizer`, else None."""
    return _mark_of(variable, "_tfdist_optimizer")


def set_table(variable: Variable, like_keras: bool) -> None:
    """Marks a weight as a table of a layer of this package.

    Args:
        variable: the weight.
        like_keras: whether the layer is used in place of
            `keras.layers.Embedding`.
    """
    for component in _components(variable):
        component._tfdist_table = like_keras


def is_table(variable: Variable) -> bool:
    """Whether a variable has the mark of `set_table`."""
    return _mark_of(variable, "_tfdist_table") is not None


def is_table_like_keras(variable: Variable) -> bool:
    """Whether a variable is a table in place of `keras.layers.Embedding`'s."""
    return bool(_mark_of(variable, "_tfdist_table"))


def set_max_norm(variable: Variable, max_norm: float) -> None:
    """Sets the largest norm of the rows of a table."""
    for component in _components(variable):
        component._tfdist_max_norm = max_norm


def max_norm(variable: Variable) -> float | None:
    """Value of `set_max_norm` for a table; None for others."""
    return _mark_of(variable, "_tfdist_max_norm")


def works_over_ranks(
    optimizer: type[tf.keras.optimizers.Optimizer],
) -> type[tf.keras.optimizers.Optimizer]:
    """Marks an optimizer class whose options apply to entire tables."""
    optimizer._tfdist_row_updates = True
    return optimizer


def does_work_over_ranks(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer's class has the mark of `works_over_ranks`."""
    return getattr(optimizer, "_tfdist_row_updates", False)


def set_element_wise(optimizer: type[tf.keras.optimizers.Optimizer]) -> None:
    """Marks an optimizer class that updates every element independently."""
    optimizer._tfdist_element_wise = True


def is_element_wise(optimizer: type) -> bool:
    """Whether a class itself, not a base, has the mark `set_element_wise`."""
    return "_tfdist_element_wise" in vars(optimizer)


def set_exported(model: Model, exported: object) -> None:
    """Stores the state of a model at its last export, for delta exports."""
    object.__setattr__(model, "_tfdist_exported", exported)


def exported(model: Model) -> Any:
    """Value of `set_exported` for a model; None if it is not set."""
    return vars(model).get("_tfdist_exported")


def set_update_watch(model: Model, watch: object) -> None:
    """Sets the watch of a model's updates during `fit`; None removes it."""
    object.__setattr__(model, "_tfdist_update_watch", watch)


def update_watch(model: Model) -> Any:
    """Value of `set_update_watch` for a model; None if it is not set."""
    return vars(model).get("_tfdist_update_watch")


def set_dependence(value: tf.Tensor, kind: str) -> None:
    """Marks how a tensor depends on the batch.

    Args:
        value: a tensor of a step.
        kind: a constant of `numbers.kinds`: SAME, MEAN, SUM, ROWS or SHARD.
    """
    value._tfdist_dependence = kind


def dependence(value: tf.Tensor) -> str | None:
    """Value of `set_dependence` for a tensor; None if it is not set."""
    return getattr(value, "_tfdist_dependence", None)


def set_per_rank(handle: tf.Tensor) -> None:
    """Marks a variable that has its own value on every rank.

    Args:
        handle: handle of a TensorFlow variable.
    """
    handle._tfdist_per_rank = True


def is_per_rank(handle: tf.Tensor) -> bool:
    """Whether a handle has the mark of `set_per_rank`."""
    return hasattr(handle, "_tfdist_per_rank")


def set_reduced(value: tf.Tensor) -> None:
    """Marks a tensor as that of the global batch, equal on all ranks."""
    value._tfdist_reduced = True


def is_reduced(value: tf.Tensor) -> bool:
    """Whether a tensor has the mark of `set_reduced`."""
    return hasattr(value, "_tfdist_reduced")


def set_named(variable: tf.Variable) -> None:
    """Marks an assigned variable as named in the log."""
    variable._tfdist_named = True


def is_named(variable: tf.Variable) -> bool:
    """Whether a variable has the mark of `set_named`."""
    return "_tfdist_named" in vars(variable)


def set_result_of(value: tf.Tensor, reading: Any, index: int) -> None:
    """Marks a tensor as the result of a metric.

    Args:
        value: the tensor, computed from the samples of this rank.
        reading: `metric_sums.Reading` of the metric's states.
        index: index of the tensor in the flat result.
    """
    value._tfdist_result_of = (reading, index)


def result_of(value: tf.Tensor) -> tuple[Any, int] | None:
    """Value of `set_result_of` for a tensor; None if it is not set."""
    return getattr(value, "_tfdist_result_of", None)


def sums_over_samples(kind: type[Metric]) -> type[Metric]:
    """Marks a class of metrics whose states are sums over samples.

    The sum of the states of all ranks is then the state of one process.

    Args:
        kind: class that defines or inherits `update_state`, `result` and
            `reset_state`. Subclasses with another of these do not count as
            marked.

    Returns:
        The class.
    """
    kind._tfdist_sums_over_samples = True
    return kind


def has_sums_over_samples(kind: type) -> bool:
    """Whether a class itself has the mark of `sums_over_samples`."""
    return "_tfdist_sums_over_samples" in vars(kind)


def set_own_part(value: tf.Tensor, part: TensorOrSlices) -> None:
    """Stores this rank's part of a gradient of the global batch."""
    value._tfdist_own_part = part


def own_part(value: tf.Tensor) -> Gradient:
    """Value of `set_own_part` for a tensor; None if it is not set."""
    return getattr(value, "_tfdist_own_part", None)


def set_distributed(dataset: tf.data.Dataset, samples: int) -> None:
    """Marks a dataset of this rank's batches, which is not split again.

    Args:
        dataset: dataset of the rank.
        samples: number of samples of a batch; 0 if unknown.
    """
    dataset._tfdist_distributed = True
    dataset._tfdist_samples = samples


def samples_of(dataset: tf.data.Dataset) -> int:
    """Samples of a dataset's batches by `set_distributed`; 0 if unknown."""
    return int(getattr(dataset, "_tfdist_samples", 0))


def is_distributed(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has the mark of `set_distributed`."""
    return getattr(dataset, "_tfdist_distributed", False)


def set_watch(dataset: tf.data.Dataset, watch: object) -> None:
    """Sets the object that is notified of the iterators of a dataset."""
    dataset._tfdist_watch = watch


def watch(dataset: tf.data.Dataset) -> Any:
    """Value of `set_watch` for a dataset; None if it is not set."""
    return getattr(dataset, "_tfdist_watch", None)


def keep_alive(graph: tf.Graph, other: tf.Graph) -> None:
    """Extends the lifetime of a graph to that of another one.

    TensorFlow deletes the functions of a graph (the branches of a `tf.cond`)
    with the graph. A copy of its ops still calls them.

    Args:
        graph: the graph that stores the reference.
        other: the graph that must live as long.
    """
    graph._tfdist_graphs_alive = [
        *getattr(graph, "_tfdist_graphs_alive", ()),
        other,
    ]


def fix(variable: Variable) -> None:
    """Marks a table whose placement a graph or a slot depends on."""
    value_of(variable)._tfdist_fixed = True


def is_fixed(variable: Variable) -> bool:
    """Whether the placement of a table may no longer change."""
    return bool(_mark_of(variable, "_tfdist_fixed"))


def set_keys(variable: Variable, keys: Trackable) -> None:
    """Sets the keys of the rows of a table with a dynamic vocabulary."""
    value_of(variable)._tfdist_keys = keys


def keys_of(variable: Variable) -> Any:
    """Value of `set_keys` for a table; None for others."""
    return _mark_of(variable, "_tfdist_keys")


def set_grows(variable: tf.Variable) -> None:
    """Marks a table or slot that may be restored from one with fewer rows.

    Args:
        variable: unpartitioned variable of TensorFlow.
    """
    variable._tfdist_grows = True


def grows(variable: Variable) -> bool:
    """Whether a variable has the mark of `set_grows`."""
    return getattr(variable, "_tfdist_grows", False)


def set_slicing(
    saved: Trackable, slicing: Callable[[tuple[int, ...]], str]
) -> None:
    """Sets how an object that grows is restored from a smaller checkpoint.

    Args:
        saved: a variable, or another object that is saved in slices.
        slicing: maps a shape in the file to the slice that is read.
    """
    saved._tfdist_slicing = slicing


def slicing(saved: Trackable) -> Callable[[tuple[int, ...]], str] | None:
    """Value of `set_slicing`; None for an object that does not grow."""
    return getattr(saved, "_tfdist_slicing", None)


def set_saved_shard(variable: tf.Variable, shard: Any) -> None:
    """Sets the `SavedShard` that saves and restores a shard of a table."""
    variable._tfdist_saved_shard = shard


def saved_shard(variable: Trackable) -> Any:
    """Value of `set_saved_shard`; None for other objects."""
    return getattr(variable, "_tfdist_saved_shard", None)


def set_feed(dataset: Any, feed: Any) -> None:
    """Sets the feed of a `PositionedDataset` that a dataset reads."""
    dataset._tfdist_feed = feed


def feed(dataset: Any) -> Any:
    """Value of `set_feed` for a dataset; None for others."""
    return getattr(dataset, "_tfdist_feed", None)
