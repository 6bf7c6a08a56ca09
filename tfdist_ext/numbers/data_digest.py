# SPDX-License-Identifier: Apache-2.0
"""Checks that all ranks read the same batches, of which each takes a slice.

A shuffle without a common seed has another order on every rank. Some samples
would then be trained twice and others never, without an error. Therefore the
ranks compare a digest of the first batch of every iterator. A difference
only causes a warning if the pipeline draws random numbers for its samples.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import warnings
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext.comm import calls
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import TensorLike

_DRAWS = ("Random", "Rng", "Stateful", "Multinomial", "SampleDistorted")
_DRAWS_TOO = ("TruncatedNormal", "ParameterizedTruncatedNormal")
_ORDERS = ("RandomShuffle", "StatefulPartitionedCall")
REMEDY = (
    "Every rank takes its slice of every batch, so all must read the same "
    "data in the same order. Give shuffles and random generators the same "
    "seed (tf.keras.utils.set_random_seed after the strategy, or seed=...), "
    "and remove `deterministic=False` from maps, interleaves and options, "
    "because it does not keep the order of elements. If each rank reads its "
    "own data, set the dataset's "
    "options.experimental_distribute.auto_shard_policy to OFF, or use "
    "strategy.distribute_datasets_from_function."
)


def draws_random_numbers(op_types: set[str]) -> bool:
    """Whether ops of a dataset's functions draw random numbers.

    Random numbers in a parallel map differ between ranks, even with equal
    seeds. Ops that only shuffle samples do not count.
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
    """Whether the ops of a dataset are known to repeat the same elements."""
    python = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
    return not draws_random_numbers(op_types) and op_types.isdisjoint(python)


class Comparison:
    """Compares batches of an iterator over the ranks.

    Args:
        collectives: collectives of the strategy.
        name: name of the dataset, equal on all ranks.
        may_differ: whether it is correct if all features differ.
    """

    def __init__(
        self, collectives: Collectives, name: str, may_differ: bool
    ) -> None:
        self._collectives = collectives
        self._name = name
        self._may_differ = may_differ

    def compare_first(self, index: tf.Tensor, batch: Nest) -> tf.Operation:
        """Compares the first batch, in a map.

        Args:
            index: int64 scalar, index of the batch.
            batch: the global batch.

        Returns:
            The comparison, which fails if the batches differ.

        Raises:
            tf.errors.InvalidArgumentError: the batches of the ranks differ,
                or the values of a batch have different numbers of samples.
                Raised on all ranks when the pipeline runs.
        """

        def compare() -> tf.Operation:
            return self.compare(index, self._digest_of(batch), list(names))

        names = dict(_features(batch))
        return tf.cond(index == 0, compare, tf.no_op)

    def digest_of_some(self, index: tf.Tensor, batch: Nest) -> tf.Tensor:
        """Input of `compare_some`, in a map: int64 `[1 + features, 2]`."""
        shape = [1 + len(dict(_features(batch))), 2]
        digest = tf.cond(
            _is_compared_later(index),
            lambda: self._digest_of(batch),
            lambda: tf.zeros(shape, tf.int64),
        )
        return tf.ensure_shape(digest, shape)

    def compare_some(
        self, index: tf.Tensor, digest: tf.Tensor, names: Sequence[str]
    ) -> None:
        """Compares the batches 1, 3, 7, 15 and so on.

        This must run when a step requests its batch, never earlier, so that
        all ranks compare the same batches.
        """
        tf.cond(
            _is_compared_later(index),
            lambda: self.compare(index, digest, names),
            tf.no_op,
        )

    def compare(
        self, index: tf.Tensor, own: tf.Tensor, names: Sequence[str]
    ) -> tf.Operation:
        """Compares the digests of a batch, which `_digest` computes."""

        def judge(index: np.ndarray, gathered: np.ndarray) -> None:
            ranks = self._collectives.group.world_size
            rows = gathered.reshape(ranks, -1, 2)
            if (rows != rows[0]).any():
                _judge(rows, names, self._may_differ, _what(int(index)))

        label = f"{self._name}/first batch"
        gathered = self._collectives.all_gather(own, label)
        return tf.group(tf.numpy_function(judge, [index, gathered], []))

    def _digest_of(self, batch: Nest) -> tf.Tensor:
        features = dict(_features(batch))
        names = list(features)
        rows = [isinstance(value, tf.Tensor) for value in features.values()]
        parts = [_parts(value) for value in features.values()]
        sizes = tf.stack([batches.size_of(v) for v in features.values()])
        # Computed in Python: every `fit` traces this again, and TensorFlow
        # optimizes all ops again for every iterator.
        digest = functools.partial(_digest, names, list(map(len, parts)), rows)
        inputs = [sizes, _samples(batch), *itertools.chain(*parts)]
        own = tf.numpy_function(digest, inputs, tf.int64)
        own.set_shape([1 + len(names), 2])
        return own


def _is_compared_later(index: tf.Tensor) -> tf.Tensor:
    """Whether a batch other than the first is compared."""
    following = tf.bitwise.bitwise_and(index, index + 1) == 0
    return tf.logical_and(index > 0, following)


def _what(index: int) -> str:
    return "their first batches" if index == 0 else f"their batches {index}"


def names_of(batch: Nest) -> list[str]:
    """Names of the compared features of a batch."""
    return list(dict(_features(batch)))


def _features(value: Nest, name: str = "") -> Iterator[tuple[str, TensorLike]]:
    """Leaves of a batch with their names, such as `0/user`."""
    items: Iterable[tuple[object, Nest]] | None = None
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
    return tf.cast(calls.count_samples(batch), tf.int64)


def _parts(value: TensorLike) -> list[tf.Tensor]:
    """Tensors of a feature; a tensor of strings is replaced by row hashes."""
    parts = tf.nest.flatten(value, expand_composites=True)
    return [
        _hashes(part) if part.dtype == tf.string else part for part in parts
    ]


def _hashes(value: tf.Tensor) -> tf.Tensor:
    rows = value[tf.newaxis] if value.shape.rank == 0 else value
    return tf.raw_ops.Fingerprint(data=rows, method=tf.constant("farmhash64"))


def _digest(
    names: Sequence[str],
    counts: Sequence[int],
    with_rows: Sequence[bool],
    sizes: np.ndarray,
    samples: np.ndarray,
    *parts: np.ndarray,
) -> np.ndarray:
    """Digest of a batch.

    Args:
        names: names of the features.
        counts: number of parts of each feature.
        with_rows: whether a feature has a single part, which is a scalar or
            has a row for each sample.
        sizes: number of samples of each feature; -1 for a scalar.
        samples: number of samples of the batch.
        *parts: parts of all features.

    Returns:
        int64 `[1 + features, 2]`. The first row has the number of samples.
        The other rows have the hash of a feature, and 1 if all its rows are
        equal, else 0.
    """
    batches.check_sizes(names, sizes.tolist())
    rest = iter(parts)
    rows = [(int(samples), 0)]
    for count, has_rows in zip(counts, with_rows, strict=True):
        of_feature = [next(rest) for _ in range(count)]
        blob = b"".join(part.tobytes() for part in of_feature)
        known = hashlib.blake2b(blob, digest_size=8).digest()
        repeats = has_rows and _repeats(blob, len(np.atleast_1d(of_feature[0])))
        rows.append(
            (int.from_bytes(known, "little", signed=True), int(repeats))
        )
    return np.array(rows, np.int64)


def _repeats(blob: bytes, rows: int) -> bool:
    return blob == blob[: len(blob) // max(rows, 1)] * rows


def _judge(
    rows: np.ndarray, names: Sequence[str], may_differ: bool, what: str
) -> None:
    """Raises or warns if the digests of the ranks differ.

    Args:
        rows: int64 `[ranks, 1 + features, 2]`, the digests of the ranks.
        names: names of the features.
        may_differ: see `Comparison`.
        what: name of the compared batches.
    """
    samples = rows[:, 0, 0]
    if (samples != samples[0]).any():
        raise ValueError(
            f"The ranks read different data: {what} have "
            f"{_by_rank(samples.tolist())} samples. {REMEDY}"
        )
    hashes, repeats = rows[:, 1:, 0], rows[:, 1:, 1].any(axis=0)
    differ = (hashes != hashes[0]).any(axis=0)
    ranks = np.flatnonzero((hashes != hashes[0]).any(axis=1)).tolist()
    listed = ", ".join(f"'{names[i]}'" for i in np.flatnonzero(differ)[:8])
    # A feature whose rows are all equal shows nothing about their order.
    if may_differ or (~differ & ~repeats).any():
        warnings.warn(
            f"The ranks read different values in {what}: {listed} of rank(s) "
            f"{ranks} differ from rank 0's. This is correct if the input "
            "pipeline changes samples at random, and wrong if ranks read "
            "samples in different orders.",
            stacklevel=1,
        )
        return
    raise ValueError(
        f"The ranks read different data: in {what} no feature is equal. "
        f"{listed} of rank(s) {ranks} differ from rank 0's. {REMEDY}"
    )


def _by_rank(values: Sequence[object]) -> str:
    return ", ".join(f"{v} (rank {r})" for r, v in enumerate(values))
