# SPDX-License-Identifier: Apache-2.0
"""Sums of dense gradients of which each step sends only some values."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.compression import Compression
from tfdist_ext.compression import RandomK
from tfdist_ext.compression import TopK
from tfdist_ext.consistency import BSP
from tfdist_ext.consistency import Consistency
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.strategy.bucket_sums import BucketSums
from tfdist_ext.strategy.bucket_sums import Key
from tfdist_ext.tables import checks


def check(
    compression: object,
    gradient_dtype: str,
    consistency: Consistency,
    where: str,
) -> None:
    """Rejects an unknown compression, and options that exclude one.

    Args:
        compression: argument of the strategy.
        gradient_dtype: argument of the strategy.
        consistency: argument of the strategy.
        where: name of the object, for errors.

    Raises:
        ValueError: the compression cannot be used.
    """
    if compression is None:
        return
    if not isinstance(compression, TopK | RandomK):
        raise ValueError(
            "Argument `compression` must be None, or a TopK or RandomK of "
            "tfdist_ext.compression, such as compression.TopK(0.01). "
            f"Received: compression={checks.brief(compression)} ({where})."
        )
    if gradient_dtype != "float32":
        raise ValueError(
            "Argument `compression` sends float32 values and cannot be "
            "combined with 16 bits. Received: compression="
            f"{checks.brief(compression)} with gradient_dtype="
            f"{gradient_dtype!r} ({where}). Leave one of them out."
        )
    if not isinstance(consistency, BSP):
        raise ValueError(
            "Argument `compression` is for gradients that are exchanged in "
            "each step. Received: compression="
            f"{checks.brief(compression)} with consistency={consistency} "
            f"({where}). Leave one of them out."
        )


def sums_of(compression: Compression, collectives: Collectives) -> BucketSums:
    """The implementation of an option of `tfdist_ext.compression`.

    Args:
        compression: the option.
        collectives: collectives of the strategy.
    """
    ranks = collectives.group.world_size
    if isinstance(compression, RandomK):
        return RandomKSums(compression, collectives)
    if compression.share * ranks >= 1:
        warnings.warn(
            f"{compression} on {ranks} ranks sends no fewer bytes than "
            "complete gradients, because each rank sends its values to all "
            f"others. Use a share below 1 / {ranks}, or RandomK, whose bytes "
            "do not depend on the number of ranks.",
            stacklevel=2,
        )
    return TopKSums(compression, collectives)


class _SparseSums(BucketSums):
    """All-reduce of some of the values, with or without error feedback.

    Args:
        compression: the option.
        collectives: collectives of the strategy.
    """

    def __init__(
        self, compression: Compression, collectives: Collectives
    ) -> None:
        super().__init__(collectives)
        self.compression = compression

    def count(self, size: int) -> int:
        """Number of values that are sent of a bucket."""
        return min(size, math.ceil(self.compression.share * size))

    def _with_errors(self, flat: tf.Tensor, key: Key) -> tf.Tensor:
        if not self.compression.error_feedback:
            return flat
        return flat + self.error(key)

    def _keep_unsent(
        self, exact: tf.Tensor, indices: tf.Tensor, key: Key
    ) -> None:
        if self.compression.error_feedback:
            sent = tf.zeros_like(indices, tf.float32)
            places = indices[:, tf.newaxis]
            self.keep(key, tf.tensor_scatter_nd_update(exact, places, sent))


class TopKSums(_SparseSums):
    """Sums of the values of largest magnitude of each rank; see `TopK`."""

    def sum_of(self, flat: tf.Tensor, label: str) -> tf.Tensor:
        """All-gathers values and indices of a float32 `[n]`, and adds up."""
        collectives = self.collectives
        size = flat.shape.num_elements()
        if not size:
            return flat
        count = self.count(size)
        key = (label, collectives.occurrence(label), "part", size)
        exact = self._with_errors(flat, key)
        magnitude = tf.abs(exact)
        magnitude = tf.where(tf.math.is_nan(exact), math.inf, magnitude)
        _, indices = tf.math.top_k(magnitude, count, sorted=False)
        self._keep_unsent(exact, indices, key)
        # The bits of an index are sent as a float32: TensorFlow's kernels for
        # int32 would move a GPU's tensors to the host.
        values = tf.gather(exact, indices)
        sent = tf.stack([values, tf.bitcast(indices, tf.float32)])
        gathered = collectives.all_gather(sent[tf.newaxis], label)
        ranks = collectives.group.world_size
        gathered = tf.ensure_shape(gathered, [ranks, 2, count])
        total = tf.zeros([size])
        # The indices of one rank are distinct. So each element is the sum of
        # values in rank order, which is the same on all ranks.
        for rank in range(ranks):
            places = tf.bitcast(gathered[rank, 1], tf.int32)[:, tf.newaxis]
            total = tf.tensor_scatter_nd_add(total, places, gathered[rank, 0])
        return total


class RandomKSums(_SparseSums):
    """Sums of values at random indices, equal on all ranks; see `RandomK`.

    The indices depend on the number of the call. Ranks agree on it in each
    call, by the largest of their numbers: a step that fails may count on some
    of them only.

    Args:
        compression: the option.
        collectives: collectives of the strategy.
    """

    def __init__(
        self, compression: Compression, collectives: Collectives
    ) -> None:
        super().__init__(compression, collectives)
        self._calls: tf.Variable | None = None
        self._call: tf.Tensor | None = None
        self._bucket = 0

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], label: str, weighted: bool = False
    ) -> list[tf.Tensor]:
        result = super().all_reduce(tensors, label, weighted)
        self._call = None  # It belongs to the graph of this call.
        return result

    def begin(self, label: str, weighted: bool) -> tf.Tensor | None:
        """Agrees on the number of this call, along with the samples."""
        if self._calls is None:
            self._calls = local_variable(
                lambda: tf.zeros([], tf.int64), "calls_of_random_k"
            )
        collectives = self.collectives
        weighted = weighted and collectives.step is not None
        samples = collectives.samples() if weighted else tf.ones([])
        # float64 represents both numbers exactly.
        mine = [tf.cast(x, tf.float64) for x in (samples, self._calls)]
        gathered = collectives.all_gather(
            tf.stack(mine)[tf.newaxis], f"{label}/samples"
        )
        self._call = tf.cast(tf.reduce_max(gathered[:, 1]), tf.int64)
        self._bucket = 0
        with tf.control_dependencies(self.checks()):
            self._calls.assign(self._call + 1)
        if not weighted:
            return None
        total = tf.cast(tf.reduce_sum(gathered[:, 0]), tf.float32)
        ranks = collectives.group.world_size
        return tf.math.divide_no_nan(samples * ranks, total)

    def sum_of(self, flat: tf.Tensor, label: str) -> tf.Tensor:
        """All-reduces values of a float32 `[n]` at drawn indices."""
        collectives = self.collectives
        size = flat.shape.num_elements()
        if not size:
            return flat
        key = (label, collectives.occurrence(label), "part", size)
        exact = self._with_errors(flat, key)
        indices, sizes = self._draw(size)
        self._keep_unsent(exact, indices, key)
        values = tf.gather(exact, indices)
        if not self.compression.error_feedback:
            values *= sizes
        (totals,) = collectives.all_reduce([values], label)
        return tf.scatter_nd(indices[:, tf.newaxis], totals, [size])

    def _draw(self, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Draws one index of each range.

        Args:
            size: number of values in the bucket.

        Returns:
            The indices, int64 `[k]`, ascending, and the sizes of their ranges,
            float32 `[k]`.
        """
        count = self.count(size)
        bounds = tf.range(count + 1, dtype=tf.int64) * size // count
        sizes = bounds[1:] - bounds[:-1]
        drawn = tf.random.stateless_uniform(
            [count],
            tf.stack([self._call, tf.constant(self._bucket, tf.int64)]),
            # The same numbers on every device.
            alg="philox",
        )
        self._bucket += 1
        offsets = tf.cast(drawn * tf.cast(sizes, tf.float32), tf.int64)
        indices = bounds[:-1] + tf.minimum(offsets, sizes - 1)
        return indices, tf.cast(sizes, tf.float32)
