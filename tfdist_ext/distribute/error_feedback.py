# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients in 16 bits that forget no error of rounding."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.collectives.buckets import buckets_of
from tfdist_ext.collectives.collectives import Collectives


class ErrorFeedback:
    """All-reduce in 16 bits with error feedback, on both ways.

    What rounding takes from a rank's part is added to its part of the next
    step; the rank that sums a chunk does the same with the sum. So errors do
    not add up over steps, whatever the rounding.

    Errors are float32, 1 + 1 / world_size as many as numbers in the gradients,
    and in no checkpoint. They are kept by label, place in the step and size: a
    smaller last batch goes on with those of the others, but so do models of one
    size that a program trains in turns.

    Source: Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent
    with Double-Pass Error-Compensated Compression, ICML 2019,
    arXiv:1905.05957.

    Args:
        collectives: of the strategy; its `gradient_dtype` is what travels.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._errors: dict[tuple[str, int, str, int], tf.Variable] = {}

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], label: str, weighted: bool = False
    ) -> list[tf.Tensor]:
        """Sums tensors over the ranks, bitwise equal on all of them.

        Args:
            tensors: float32, of static shapes.
            label: names the exchange in errors.
            weighted: as of `Collectives.all_reduce`.

        Returns:
            The sums, in order.
        """
        result = list(tensors)
        share = None
        if weighted and tensors:
            share = self._collectives.share_of_samples(label)
        for indices in buckets_of(tensors):
            shapes = [tensors[i].shape for i in indices]
            flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], 0)
            if share is not None:
                # Of a rank without samples not even NaNs count.
                flat = tf.where(share > 0, flat * share, 0)
            total = self._sum(flat, label)
            sizes = [shape.num_elements() for shape in shapes]
            parts = tf.split(total, sizes)
            for i, part, shape in zip(indices, parts, shapes, strict=True):
                result[i] = tf.reshape(part, shape)
        return result

    def _sum(self, flat: tf.Tensor, label: str) -> tf.Tensor:
        """A reduce-scatter and an all-gather of float32 `[n]`."""
        collectives = self._collectives
        ranks = collectives.group.world_size
        size = flat.shape.num_elements()
        chunk = -(-size // ranks)
        flat = tf.pad(flat, [[0, ranks * chunk - size]])
        place = label, collectives.occurrence(label)
        sent = self._round(flat, (*place, "part", ranks * chunk))
        splits = tf.fill([ranks], tf.constant(chunk, tf.int64))
        parts, _ = collectives.all_to_all(sent, splits, label)
        parts = tf.cast(tf.reshape(parts, [ranks, chunk]), tf.float32)
        total = tf.reduce_sum(parts, axis=0)
        total = self._round(total, (*place, "sum", chunk))
        gathered = collectives.all_gather(total, label)
        return tf.cast(gathered[:size], tf.float32)

    def _round(
        self, exact: tf.Tensor, key: tuple[str, int, str, int]
    ) -> tf.Tensor:
        kept = self._error(key)
        exact += kept
        rounded = tf.cast(exact, self._collectives.gradient_dtype)
        error = exact - tf.cast(rounded, tf.float32)
        # What is infinite or no number ends with its step.
        error = tf.where(tf.math.is_finite(error), error, 0)
        # A step that fails because of a bad id changes nothing.
        step = self._collectives.step
        with tf.control_dependencies(step.checks_here() if step else None):
            kept.assign(error)
        return rounded

    def _error(self, key: tuple[str, int, str, int]) -> tf.Variable:
        if key not in self._errors:
            label, occurrence, kind, size = key
            with tf.init_scope():
                self._errors[key] = tf.Variable(
                    tf.zeros([size]),
                    trainable=False,
                    name=f"error_of_{kind}/{label}/{occurrence}",
                    synchronization=tf.VariableSynchronization.NONE,
                )
        return self._errors[key]
