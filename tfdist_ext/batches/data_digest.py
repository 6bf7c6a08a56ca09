# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks read the same batches, of which each keeps its slice.

A shuffle without a common seed gives every rank another order: some samples
would be trained twice and others never, without a word. So the ranks compare
a digest of the first batch of every iterator. What differs by right, because
the pipeline draws random numbers for its samples, only causes a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.collectives import step
from tfdist_ext.collectives.collectives import Collectives

Nest = Any

_DRAWS = ("Random", "Rng", "Stateful", "Multinomial", "SampleDistorted")
_DRAWS_TOO = ("TruncatedNormal", "ParameterizedTruncatedNormal")
_ORDERS = ("RandomShuffle", "StatefulPartitionedCall")
REMEDY = (
    "Every rank keeps its slice of every batch, so all must read the same "
    "data in the same order. Give shuffles and random generators one seed "
    "(tf.keras.utils.set_random_seed after the strategy, or seed=...). For "
    "data of each rank's own set the dataset's options."
    "experimental_distribute.auto_shard_policy to OFF, or use "
    "strategy.distribute_datasets_from_function."
)


def draws_random_numbers(op_types: set[str]) -> bool:
    """Whether ops of a dataset's functions draw random numbers.

    Numbers drawn in a parallel map are not the same on all ranks, whatever
    the seeds; those that put samples into another order do not count.
    """
    return any(
        op in _DRAWS_TOO
        or (
            op.startswith(_DRAWS)
            and op not in _ORDERS
            and not op.endswith("Dataset")
        )
        for op in op_types
    )


def is_pure(op_types: set[str]) -> bool:
    """Whether a dataset gives the same again, as far as its ops tell."""
    python = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
    return not draws_random_numbers(op_types) and op_types.isdisjoint(python)


def compare_first(
    index: tf.Tensor,
    batch: Nest,
    may_differ: bool,
    collectives: Collectives,
    name: str,
) -> None:
    """Compares the first batch of an iterator over the ranks, in a map.

    Args:
        index: int64 scalar, of the batch.
        batch: the global batch.
        may_differ: whether features may differ by right, all of them.
        collectives: of the strategy.
        name: of the dataset, the same on all ranks.

    Raises:
        tf.errors.InvalidArgumentError: on all ranks, when the pipeline runs.
    """
    features = dict(_features(batch))

    def report(gathered: np.ndarray) -> None:
        rows = gathered.reshape(collectives.group.world_size, -1, 2)
        _judge(rows, list(features), may_differ)

    def compare() -> tf.Tensor:
        own = _digests(features.values())
        own = tf.concat([[[_samples(batch), 0]], own], 0)
        gathered = collectives.all_gather(own, f"{name}/first batch")
        everyone = tf.tile(own, [collectives.group.world_size, 1])
        tf.cond(
            tf.reduce_all(gathered == everyone),
            tf.no_op,
            lambda: tf.group(tf.numpy_function(report, [gathered], [])),
        )
        return tf.constant(True)

    tf.cond(index == 0, compare, lambda: tf.constant(True))


def _features(value: Nest, name: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a batch by their names, such as `0/user`."""
    items: Any = None
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, tuple | list):
        items = enumerate(value)
    if items is None:
        if not isinstance(value, tf.experimental.Optional):
            yield name or "the batch", value
        return
    for key, part in items:
        yield from _features(part, f"{name}/{key}".removeprefix("/"))


def _samples(batch: Nest) -> tf.Tensor:
    return tf.cast(step.count_samples(batch), tf.int64)


def _digests(features: Collection[Any]) -> tf.Tensor:
    """int64 `[features, 2]`: a hash, and 1 if all rows are alike."""
    # Few ops: every `fit` traces this anew.
    one_row, axis = tf.constant([1, -1]), tf.constant(0)
    method = tf.constant("farmhash64")

    def hashes(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.Fingerprint(data=value, method=method)

    def hash_of(value: Any) -> tf.Tensor:
        parts = tf.nest.flatten(value, expand_composites=True)
        found = [hashes(tf.reshape(part, one_row)) for part in parts]
        if len(found) == 1:
            return found[0]
        return hashes(tf.reshape(tf.concat(found, 0), one_row))

    def is_alike(value: Any) -> tf.Tensor:
        if not isinstance(value, tf.Tensor):
            return tf.constant(False)
        if value.shape.rank == 0:
            return tf.constant(True)
        rows = tf.bitcast(hashes(value), tf.int64)
        return tf.reduce_max(rows, axis) <= tf.reduce_min(rows, axis)

    all_hashes = tf.concat([hash_of(value) for value in features], 0)
    alike = tf.stack([is_alike(value) for value in features])
    return tf.stack(
        [tf.bitcast(all_hashes, tf.int64), tf.cast(alike, tf.int64)], 1
    )


def _judge(rows: np.ndarray, names: Sequence[str], may_differ: bool) -> None:
    """Raises or warns.

    Args:
        rows: int64 `[ranks, 1 + features, 2]`, equal numbers of samples
            first.
        names: of the features.
        may_differ: see `compare_first`.
    """
    samples = rows[:, 0, 0]
    if (samples != samples[0]).any():
        raise ValueError(
            "The ranks read different data: their first batches have "
            f"{_by_rank(samples.tolist())} samples. {REMEDY}"
        )
    hashes, alike = rows[:, 1:, 0], rows[:, 1:, 1].any(axis=0)
    differ = (hashes != hashes[0]).any(axis=0)
    ranks = np.flatnonzero((hashes != hashes[0]).any(axis=1)).tolist()
    listed = ", ".join(f"'{names[i]}'" for i in np.flatnonzero(differ)[:8])
    # Rows that are all alike tell nothing of their order.
    if may_differ or (~differ & ~alike).any():
        warnings.warn(
            "The ranks read different values in their first batches: "
            f"{listed} of rank(s) {ranks} differ from rank 0's. That is "
            "right where the input pipeline changes samples at random, and "
            "wrong where ranks read samples in another order.",
            stacklevel=1,
        )
        return
    raise ValueError(
        "The ranks read different data: in their first batches no feature "
        f"agrees. {listed} of rank(s) {ranks} differ from rank 0's. {REMEDY}"
    )


def _by_rank(values: Sequence[Any]) -> str:
    return ", ".join(f"{v} (rank {r})" for r, v in enumerate(values))
