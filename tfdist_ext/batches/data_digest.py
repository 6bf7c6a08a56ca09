# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks read the same batches, of which each keeps its slice.

A shuffle without a common seed gives every rank another order: some samples
would be trained twice and others never, without a word. So the ranks compare
a digest of the first batch of every iterator. What differs by right, because
the pipeline draws random numbers for its samples, only causes a warning.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import warnings
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
    names = list(features)
    with_rows = [isinstance(value, tf.Tensor) for value in features.values()]

    def judge(gathered: np.ndarray) -> None:
        rows = gathered.reshape(collectives.group.world_size, -1, 2)
        if (rows != rows[0]).any():
            _judge(rows, names, may_differ)

    def compare() -> tf.Operation:
        parts = [_parts(value) for value in features.values()]
        # In Python: every `fit` traces this anew, and TensorFlow goes through
        # all ops again for every iterator.
        digest = functools.partial(_digest, list(map(len, parts)), with_rows)
        inputs = [_samples(batch), *itertools.chain(*parts)]
        own = tf.numpy_function(digest, inputs, tf.int64)
        own.set_shape([1 + len(names), 2])
        gathered = collectives.all_gather(own, f"{name}/first batch")
        return tf.group(tf.numpy_function(judge, [gathered], []))

    tf.cond(index == 0, compare, tf.no_op)


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


def _parts(value: Any) -> list[tf.Tensor]:
    """The tensors of a feature; those of strings as a hash of each row."""
    parts = tf.nest.flatten(value, expand_composites=True)
    return [
        _hashes(part) if part.dtype == tf.string else part for part in parts
    ]


def _hashes(value: tf.Tensor) -> tf.Tensor:
    rows = value[tf.newaxis] if value.shape.rank == 0 else value
    return tf.raw_ops.Fingerprint(data=rows, method=tf.constant("farmhash64"))


def _digest(
    counts: Sequence[int],
    with_rows: Sequence[bool],
    samples: np.ndarray,
    *parts: np.ndarray,
) -> np.ndarray:
    """What is compared of a batch.

    Args:
        counts: parts of each feature.
        with_rows: of each feature, whether it has one part, with a row for
            each sample, or a scalar.
        samples: their number.
        *parts: of all features.

    Returns:
        int64 `[1 + features, 2]`: the samples; a hash of each feature, and 1
        if all its rows are alike.
    """
    rest = iter(parts)
    rows = [(int(samples), 0)]
    for count, has_rows in zip(counts, with_rows, strict=True):
        of_feature = [next(rest) for _ in range(count)]
        blob = b"".join(part.tobytes() for part in of_feature)
        known = hashlib.blake2b(blob, digest_size=8).digest()
        alike = has_rows and _repeats(blob, len(np.atleast_1d(of_feature[0])))
        rows.append((int.from_bytes(known, "little", signed=True), int(alike)))
    return np.array(rows, np.int64)


def _repeats(blob: bytes, rows: int) -> bool:
    return blob == blob[: len(blob) // max(rows, 1)] * rows


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
