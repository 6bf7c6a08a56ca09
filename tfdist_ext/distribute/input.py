# SPDX-License-Identifier: Apache-2.0
"""Splits a dataset by sample over the ranks, equally many steps on each.

Everything is plain tf.data, so the result is an ordinary `tf.data.Dataset`
and a step costs what a local one costs. Stock strategies ask all ranks at
every step whether anybody has data left; here that is settled once when the
number of batches is known, and asked inside the pipeline when it is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches import data_digest
from tfdist_ext.batches import empty_batches
from tfdist_ext.batches import lengths
from tfdist_ext.batches import slicing
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.distribute import pipelines
from tfdist_ext.prefetch import prefetched_ids

Nest = Any
_Policy = tf.data.experimental.AutoShardPolicy
_INFINITE = int(tf.data.INFINITE_CARDINALITY)


def distribute(
    dataset: tf.data.Dataset, collectives: Collectives, name: str
) -> tf.data.Dataset:
    """This rank's part of a dataset batched by the global batch size.

    With the policies AUTO and DATA every rank reads the same dataset and
    keeps its slice of every batch: the ranks together see exactly the
    batches that one process would see. FILE gives every rank its own files,
    OFF its own dataset; both keep the global batch size.

    Args:
        dataset: yields global batches.
        collectives: of the strategy.
        name: the same on all ranks, for tags and errors.

    Returns:
        A dataset of local batches, the same number of them on every rank:
        a rank whose data ends first yields batches of zero samples.
    """
    rank, world_size = collectives.group.rank, collectives.group.world_size
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy in (_Policy.FILE, _Policy.OFF):
        batch = internals.batch_size_of(dataset)
        if batch < 0:
            raise ValueError(
                f"Dataset with auto_shard_policy={policy.name} has no fixed "
                "batch size, so it cannot be cut into per-rank batches. "
                "Batch it with `.batch(global_batch_size)` as the last step "
                "or use `strategy.distribute_datasets_from_function`."
            )
        if batch < world_size:
            raise ValueError(
                f"Dataset with auto_shard_policy={policy.name} has batches of "
                f"{batch}, fewer samples than the {world_size} ranks. Batch "
                "it by the global batch size, or use the policy DATA."
            )
        _require_cut_by_tensorflow(dataset, policy)
        if policy == _Policy.FILE:
            dataset = internals.shard_by_file(dataset, world_size, rank)
        local = dataset.rebatch(
            [(rank + 1) * batch // world_size - rank * batch // world_size]
        ).map(_in_own_memory, num_parallel_calls=tf.data.AUTOTUNE)
    else:
        lengths.check(dataset.element_spec, "The dataset")
        return _slices(dataset, collectives, name)
    return equal_steps(local, collectives, name)


def _slices(
    dataset: tf.data.Dataset, collectives: Collectives, name: str
) -> tf.data.Dataset:
    rank, world_size = collectives.group.rank, collectives.group.world_size
    op_types = internals.op_types(dataset)
    compared = data_digest.Comparison(
        collectives, name, data_digest.draws_random_numbers(op_types)
    )
    pure = data_digest.is_pure(op_types)
    may_part = internals.may_change_order(dataset) or not pure
    later = pipelines.compare(dataset, may_part, collectives)
    names: list[str] = []

    def cut(index: tf.Tensor, batch: Nest) -> Nest:
        compared.compare_first(index, batch)
        part = slicing.slice_of_rank(batch, rank, world_size)
        if not later:
            return part
        names[:] = data_digest.names_of(batch)
        return index, compared.digest_of_some(index, batch), part

    def compare(index: tf.Tensor, digest: tf.Tensor, part: Nest) -> Nest:
        compared.compare_some(index, digest, names)
        return part

    local = dataset.enumerate().map(
        cut, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    options = tf.data.Options()
    policy = dataset.options().experimental_external_state_policy
    if policy is None and pure:
        # The comparison has no state that a saved iterator would need.
        options.experimental_external_state_policy = (
            tf.data.experimental.ExternalStatePolicy.IGNORE
        )
    local = local.with_options(options)
    return equal_steps(
        local, collectives, name, True, compare if later else None
    )


def _require_cut_by_tensorflow(dataset: tf.data.Dataset, policy: Any) -> None:
    """Refuses values that only we can cut by samples, see `empty_batches`."""
    if any(
        hasattr(spec, "empty") for spec in tf.nest.flatten(dataset.element_spec)
    ):
        raise ValueError(
            "A dataset with ids of a layer's `preprocess` cannot be cut into "
            f"per-rank batches with auto_shard_policy={policy.name}. Use the "
            "policy DATA, or call `preprocess` on what "
            "`strategy.distribute_datasets_from_function` makes."
        )


def _single(arguments: tuple[Any, ...]) -> Nest:
    return arguments if len(arguments) > 1 else arguments[0]


def _in_own_memory(*batch: Nest) -> Nest:
    return slicing.in_own_memory(_single(batch))


def has_optional(dataset: tf.data.Dataset) -> bool:
    """Whether there are `tf.experimental.Optional` in a dataset.

    Keras 3 makes them of the None in (x, y, None) of a generator.
    """
    flat = tf.nest.flatten(dataset.element_spec)
    return any(isinstance(spec, tf.OptionalSpec) for spec in flat)


def read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset for one process alone, read while a step runs.

    It stays one of plain tf.data. Stock's iterators for devices are made of a
    dozen functions, which are traced for every loop, and ask a thread and
    several ops at every step.

    Args:
        dataset: of any batches.
    """
    return dataset if internals.reads_ahead(dataset) else dataset.prefetch(1)


def own_batches(
    dataset: tf.data.Dataset, collectives: Collectives, name: str
) -> tf.data.Dataset:
    """A dataset of per-rank batches that a rank has made for itself.

    Args:
        dataset: yields local batches.
        collectives: of the strategy.
        name: the same on all ranks, for tags and errors.

    Returns:
        The batches, as many on every rank.
    """
    copies = dataset.map(_in_own_memory, synchronous=True)
    return equal_steps(copies, collectives, name)


def equal_steps(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    same_data: bool = False,
    finish: Callable[..., Nest] | None = None,
) -> tf.data.Dataset:
    """Pads a local dataset with empty batches to the longest rank's length.

    Args:
        dataset: this rank's batches.
        collectives: of the strategy.
        name: the same on all ranks, for tags and errors.
        same_data: whether all ranks read one dataset.
        finish: makes a batch of an element when a step asks for it; None
            where elements are batches.

    Returns:
        A dataset with the same number of batches on every rank.

    Raises:
        ValueError: if the dataset is infinite on some ranks only, or
            lengths of `same_data` differ.
    """
    steps = collectives.all_gather(
        tf.reshape(dataset.cardinality(), [1]), f"{name}/cardinality"
    ).numpy()
    if (steps == _INFINITE).any():
        if (steps != _INFINITE).any():
            raise ValueError(
                "The dataset is infinite on some ranks and ends on others. "
                f"Batches per rank: {steps.tolist()} (-1: infinite, -2: "
                "unknown). Repeat it on all ranks or on none."
            )
        return _finished(dataset, finish)
    if same_data and (steps != steps[0]).any():
        raise ValueError(
            "The ranks read different data. Batches per rank: "
            f"{steps.tolist()} (-2: unknown). {data_digest.REMEDY}"
        )
    if (steps >= 0).all():
        longest = int(steps.max())
        if int(steps.min()) == longest:
            return _finished(dataset, finish)
        return _finished(
            dataset.concatenate(empty_batches.like(dataset)).take(longest),
            finish,
        )
    return _until_all_end(dataset, collectives, name, finish)


def _until_all_end(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    finish: Callable[..., Nest] | None,
) -> tf.data.Dataset:
    def ask(has_data: tf.Tensor, batch: Nest) -> tuple[tf.Tensor, Nest]:
        count = tf.reshape(tf.cast(has_data, tf.int32), [1])
        total = collectives.all_reduce([count], f"{name}/has_data")[0]
        return total[0] > 0, batch

    flag = tf.data.Dataset.from_tensors
    marked = tf.data.Dataset.zip((flag(True).repeat(), dataset))
    empty = tf.data.Dataset.zip((flag(False), empty_batches.like(dataset)))
    # Asked when the step asks for its batch, never ahead of it: an iterator
    # that is dropped half-way leaves no question open on some ranks only.
    # Synchronous: tf.data would make an own thread run ahead of a plain map.
    return _finished(
        marked.prefetch(tf.data.AUTOTUNE)
        .concatenate(empty.repeat())
        .map(ask, synchronous=True)
        .take_while(lambda any_data, _: any_data)
        .map(lambda _, batch: batch, synchronous=True),
        finish,
    )


def _finished(
    dataset: tf.data.Dataset, finish: Callable[..., Nest] | None
) -> tf.data.Dataset:
    if finish is not None:
        dataset = dataset.map(finish, synchronous=True)
    dataset = prefetched_ids.with_next(dataset)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_distribute.auto_shard_policy = _Policy.OFF
    if dataset.options().autotune.enabled is None:
        # The end of an iterator can wait for its autotuner's next round, up
        # to a minute: TensorFlow wakes it before it marks it cancelled. All
        # ranks would wait along. AUTOTUNE then means as many calls as cores,
        # and a prefetch buffer that grows by need.
        options.autotune.enabled = False
    return dataset.with_options(options)
