# SPDX-License-Identifier: Apache-2.0
"""Splits a dataset by samples over the ranks, with equally many steps."""

from __future__ import annotations

import json
import pathlib
import socket
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.numbers import data_digest
from tfdist_ext.strategy.balance import Balance
from tfdist_ext.type_names import Nest

Finish = Callable[[tf.data.Dataset], tf.data.Dataset]


# Number of distinct names of datasets. A program may create any number of
# datasets, one in every `fit`. Names are reused, because the buffers of a
# name's exchanges are never freed.
_DATASETS = 64


class DatasetNames:
    """Counts datasets, with the same number on all ranks."""

    def __init__(self) -> None:
        self._number = 0

    def next(self, collectives: Collectives) -> str:
        """A name that is the same on all ranks; all ranks must call this.

        Args:
            collectives: collectives of the strategy.
        """
        # A rank that failed where others continued has counted fewer.
        numbers = collectives.all_gather(
            tf.constant([self._number], tf.int64), "input/number"
        )
        self._number = int(numbers[0]) % _DATASETS + 1
        return f"input{self._number}"


def compare_pipelines(
    dataset: tf.data.Dataset,
    may_part: bool,
    collectives: Collectives,
    balance: str = "equal",
) -> bool:
    """Rejects a dataset that several ranks of one host cache in one file.

    Each rank reads the entire dataset, and would write the entire file.

    Args:
        dataset: dataset of this rank; all ranks must call this function.
        may_part: whether this rank's data may differ from that of other ranks
            after the first batch.
        collectives: collectives of the strategy.
        balance: text of the strategy's argument `balance`.

    Returns:
        Whether `may_part` is True on any rank.

    Raises:
        ValueError: the error names the file and the ranks, or the values of
            `balance`, which differ; raised on all ranks.
    """
    files = [
        str(pathlib.Path(name).absolute())
        for name in internals.cache_files(dataset)
    ]
    info = [socket.gethostname(), files, may_part, balance]
    text = json.dumps(info).encode() + b"\n"
    own = tf.constant(np.frombuffer(text, np.uint8))
    gathered = collectives.all_gather(own, "dataset").numpy().tobytes()
    ranks = [json.loads(line) for line in gathered.splitlines()]
    _check_files([(host, names) for host, names, _, _ in ranks])
    if len({text for *_, text in ranks}) > 1:
        given = ", ".join(f"{t} (rank {r})" for r, (*_, t) in enumerate(ranks))
        raise ValueError(
            "Argument `balance` of the strategy differs between ranks, so "
            "they would train some samples twice and others never. Give all "
            f"ranks the same. Received: {given}."
        )
    return any(may for _, _, may, _ in ranks)


def _check_files(of_ranks: Sequence[tuple[str, list[str]]]) -> None:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, names) in enumerate(of_ranks):
        for name in set(names):
            users.setdefault((host, name), []).append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) > 1:
            raise ValueError(
                f"Ranks {ranks} cache a dataset in one file, '{name}', and "
                "each of them would write all of it. Give each rank a file "
                "of its own: `dataset.cache(f'{path}-{strategy.rank}')`. Or "
                "cache in memory: `dataset.cache()`."
            )


_Policy = tf.data.experimental.AutoShardPolicy
_INFINITE = int(tf.data.INFINITE_CARDINALITY)


def distribute(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    balance: Balance | None = None,
) -> tf.data.Dataset:
    """This rank's part of a dataset batched by the global batch size.

    With the policies AUTO and DATA every rank reads the same dataset and
    takes its slice of every batch, so the ranks jointly train exactly the
    batches of one process. With FILE every rank reads its own files, with
    OFF its own dataset; the global batch size is the same.

    Args:
        dataset: yields global batches.
        collectives: collectives of the strategy.
        name: name of the dataset in tags and errors, equal on all ranks.
        balance: shares of the ranks; None for equal ones.

    Returns:
        A dataset of local batches, the same number of them on every rank:
        a rank whose data ends first yields batches of zero samples.

    Raises:
        ValueError: the dataset cannot be divided, or the ranks' datasets or
            shares differ.
    """
    rank, world_size = collectives.group.rank, collectives.group.world_size
    policy = dataset.options().experimental_distribute.auto_shard_policy
    balance = balance or Balance("equal", world_size)
    feed = feed_of(dataset)
    if feed is not None:
        return _followed(feed, dataset, collectives, name, balance)
    if policy in (_Policy.FILE, _Policy.OFF):
        _require_equal(balance, f"auto_shard_policy={policy.name}")
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
        batches.check_lengths(dataset.element_spec, "The dataset")
        return _slices(dataset, collectives, name, balance)
    return equal_steps(local, collectives, name)


def _require_equal(balance: Balance, data: str) -> None:
    """Rejects shares of batches where each rank reads its own data."""
    if not balance.is_equal:
        raise ValueError(
            "Argument `balance` of the strategy divides batches that all ranks "
            f"read, and with {data} each rank reads its own data. Use the "
            "policy DATA, or balance='equal'. Received: "
            f"balance={balance.describe()}."
        )


# Transformations after which a batch has the records that it had before.
_KEEP_RECORDS = (
    "MapDataset",
    "ParallelMapDataset",
    "PrefetchDataset",
    "OptionsDataset",
)


def feed_of(dataset: tf.data.Dataset) -> Any:
    """The feed of the `PositionedDataset` that a dataset reads, or None.

    Args:
        dataset: dataset that is about to be distributed.

    Raises:
        ValueError: a transformation changes which records a batch has, or
            layers prefetch ids.
    """
    changed = ""
    within = internals.datasets_within(dataset)
    for each in within:
        if marks.feed(each) is not None:
            break
        kind = type(each).__name__.lstrip("_")
        if kind not in _KEEP_RECORDS and not changed:
            changed = kind
    else:
        return None
    if internals.may_change_order(dataset):
        changed = changed or "map with deterministic=False"
    if changed:
        raise ValueError(
            f"The dataset of a PositionedDataset has a {changed}, after which "
            "its batches do not tell which records they have. After "
            "`batches()`, use only `map`, `prefetch` and `with_options`. Drop "
            "samples in a function of `map`, by `tf.boolean_mask`."
        )
    flat = tf.nest.flatten(dataset.element_spec)
    if any(map(prefetched_ids.is_prefetched, flat)):
        raise ValueError(
            "Layers with prefetch_ids=True read a batch ahead of the position "
            "of a PositionedDataset. Use prefetch_ids=False."
        )
    return marks.feed(each)


def _followed(
    feed: Any,
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    balance: Balance,
) -> tf.data.Dataset:
    if not feed.divides:
        local = _slices(dataset, collectives, name, balance)
    else:
        _require_equal(balance, "a PositionedDataset")
        local = dataset.map(_in_own_memory, synchronous=True)
    return feed.distributed(local, collectives, name)


def followed(dataset: tf.data.Dataset) -> tf.data.Dataset | None:
    """The dataset of one process that moves the position of its stream.

    Args:
        dataset: any dataset.

    Returns:
        The dataset; None if it does not read a `PositionedDataset`.
    """
    feed = feed_of(dataset)
    if feed is None:
        return None
    local = dataset.map(_in_own_memory, synchronous=True)
    return feed.distributed(local, None, "")


def _slices(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    balance: Balance,
) -> tf.data.Dataset:
    op_types = internals.op_types(dataset)
    compared = data_digest.Comparison(
        collectives, name, data_digest.draws_random_numbers(op_types)
    )
    pure = data_digest.is_pure(op_types)
    may_part = internals.may_change_order(dataset) or not pure
    later = compare_pipelines(
        dataset, may_part, collectives, balance.describe()
    )
    names: list[str] = []

    def cut(index: tf.Tensor, batch: Nest) -> Nest:
        first = compared.compare_first(index, batch)
        part = batch
        if not balance.is_measured:
            # If values have other numbers of samples, the comparison says so.
            with tf.control_dependencies([first]):
                part = balance.part_of(batch, collectives)
        if not later:
            return part
        names[:] = data_digest.names_of(batch)
        return index, compared.digest_of_some(index, batch), part

    def compare(index: tf.Tensor, digest: tf.Tensor, part: Nest) -> Nest:
        compared.compare_some(index, digest, names)
        return part

    def finish(local: tf.data.Dataset) -> tf.data.Dataset:
        if later:
            local = local.map(compare, synchronous=True)
        if balance.is_measured:
            local = balance.cut(local, collectives, name)
        return local

    local = dataset.enumerate().map(
        cut, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
    )
    options = tf.data.Options()
    policy = dataset.options().experimental_external_state_policy
    if policy is None and pure:
        # A saved iterator needs no state of the comparison.
        options.experimental_external_state_policy = (
            tf.data.experimental.ExternalStatePolicy.IGNORE
        )
    local = local.with_options(options)
    return equal_steps(local, collectives, name, True, finish)


def _require_cut_by_tensorflow(
    dataset: tf.data.Dataset, policy: tf.data.experimental.AutoShardPolicy
) -> None:
    """Rejects values that `Dataset.rebatch` cannot cut (`empty_like`)."""
    if any(
        hasattr(spec, "empty") for spec in tf.nest.flatten(dataset.element_spec)
    ):
        raise ValueError(
            "A dataset with ids of a layer's `preprocess` cannot be cut into "
            f"per-rank batches with auto_shard_policy={policy.name}. Use the "
            "policy DATA, or call `preprocess` on what "
            "`strategy.distribute_datasets_from_function` makes."
        )


def _single(arguments: tuple[Nest, ...]) -> Nest:
    return arguments if len(arguments) > 1 else arguments[0]


def _in_own_memory(*batch: Nest) -> Nest:
    return batches.in_own_memory(_single(batch))


def has_optional(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset has elements of type `tf.experimental.Optional`.

    Keras 3 uses them for the None in the (x, y, None) of a generator.
    """
    flat = tf.nest.flatten(dataset.element_spec)
    return any(isinstance(spec, tf.OptionalSpec) for spec in flat)


def read_ahead(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A dataset for a single process that is read while a step runs.

    It remains a plain tf.data dataset. The stock iterator for devices
    consists of a dozen functions, which are traced for every loop, and uses a
    thread and several ops in every step.

    Args:
        dataset: dataset of any batches.
    """
    return dataset if internals.reads_ahead(dataset) else dataset.prefetch(1)


def own_batches(
    dataset: tf.data.Dataset, collectives: Collectives, name: str
) -> tf.data.Dataset:
    """Prepares a dataset of per-rank batches that a rank has created.

    Args:
        dataset: yields local batches.
        collectives: collectives of the strategy.
        name: name of the dataset in tags and errors, equal on all ranks.

    Returns:
        A dataset of these batches, with the same number on every rank.
    """
    copies = dataset.map(_in_own_memory, synchronous=True)
    return equal_steps(copies, collectives, name)


def equal_steps(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    same_data: bool = False,
    finish: Finish | None = None,
) -> tf.data.Dataset:
    """Pads a local dataset with empty batches to the longest rank's length.

    Args:
        dataset: this rank's batches.
        collectives: collectives of the strategy.
        name: name of the dataset in tags and errors, equal on all ranks.
        same_data: whether all ranks read one dataset.
        finish: makes a dataset of batches, each when a step requests it; None
            if the elements are batches.

    Returns:
        A dataset with the same number of batches on every rank.

    Raises:
        ValueError: the dataset is infinite on some ranks only, or the lengths
            differ and `same_data` is set.
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
            dataset.concatenate(batches.empty_like(dataset)).take(longest),
            finish,
        )
    return _until_all_end(dataset, collectives, name, finish)


def _until_all_end(
    dataset: tf.data.Dataset,
    collectives: Collectives,
    name: str,
    finish: Finish | None,
) -> tf.data.Dataset:
    def ask(has_data: tf.Tensor, batch: Nest) -> tuple[tf.Tensor, Nest]:
        count = tf.reshape(tf.cast(has_data, tf.int32), [1])
        total = collectives.all_reduce([count], f"{name}/has_data")[0]
        return total[0] > 0, batch

    flag = tf.data.Dataset.from_tensors
    marked = tf.data.Dataset.zip((flag(True).repeat(), dataset))
    empty = tf.data.Dataset.zip((flag(False), batches.empty_like(dataset)))
    # The ranks exchange `has_data` when a step requests its batch, never
    # earlier: an iterator that is dropped half-way leaves no exchange that
    # only some ranks have started. `synchronous` is needed because tf.data
    # runs a plain map ahead in a thread of its own.
    return _finished(
        marked.prefetch(tf.data.AUTOTUNE)
        .concatenate(empty.repeat())
        .map(ask, synchronous=True)
        .take_while(lambda any_data, _: any_data)
        .map(lambda _, batch: batch, synchronous=True),
        finish,
    )


def _finished(
    dataset: tf.data.Dataset, finish: Finish | None
) -> tf.data.Dataset:
    if finish is not None:
        dataset = finish(dataset)
    dataset = prefetched_ids.with_next(dataset)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    # Another policy is not changed: TensorFlow warns if an option changes.
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == _Policy.AUTO:
        options.experimental_distribute.auto_shard_policy = _Policy.OFF
    if dataset.options().autotune.enabled is None:
        # An iterator can wait up to a minute for the next round of its
        # autotuner when it ends, because TensorFlow wakes the autotuner
        # before it marks it as cancelled. All ranks would wait with it.
        # Without autotuning, AUTOTUNE means as many calls as cores, and a
        # prefetch buffer that grows when it is empty.
        options.autotune.enabled = False
    return dataset.with_options(options)
