# SPDX-License-Identifier: Apache-2.0
"""Sums of dense gradients by bucket, with errors kept for the next step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.collectives import buckets_of
from tfdist_ext.embedding.sharded_variable import local_variable

# Label and occurrence of an exchange, kind of the error, number of values.
Key = tuple[str, int, str, int]
_Errors = dict[Key, tf.Variable]


class BucketSums:
    """All-reduce of float32 tensors that a subclass sends in fewer bytes.

    Errors of a step, which are added in the next one, are not saved in
    checkpoints. They are stored by variables or optimizer (see `Step.owners`),
    label, occurrence in the step, and size. Steps of another batch size
    therefore share them.

    A subclass defines `sum_of`.

    Args:
        collectives: collectives of the strategy.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.collectives = collectives
        self._errors: dict[
            tuple[int, ...], tuple[weakref.ref[object], _Errors]
        ] = {}

    def all_reduce(
        self, tensors: Sequence[tf.Tensor], label: str, weighted: bool = False
    ) -> list[tf.Tensor]:
        """Sums tensors over the ranks, bitwise equal on all of them.

        Args:
            tensors: float32, with static shapes.
            label: names the exchange in errors.
            weighted: see `Collectives.all_reduce`.

        Returns:
            The sums, in order.
        """
        result = list(tensors)
        if not tensors:
            return result
        share = self.begin(label, weighted)
        for indices in buckets_of(tensors):
            shapes = [tensors[i].shape for i in indices]
            flat = tf.concat([tf.reshape(tensors[i], [-1]) for i in indices], 0)
            if share is not None:
                # A rank without samples contributes zeros, even for NaNs.
                flat = tf.where(share > 0, flat * share, 0)
            total = self.sum_of(flat, label)
            sizes = [shape.num_elements() for shape in shapes]
            parts = tf.split(total, sizes)
            for i, part, shape in zip(indices, parts, shapes, strict=True):
                result[i] = tf.reshape(part, shape)
        return result

    def begin(self, label: str, weighted: bool) -> tf.Tensor | None:
        """Prepares the sums of one call.

        Args:
            label: names the exchange in errors.
            weighted: see `Collectives.all_reduce`.

        Returns:
            See `Collectives.share_of_samples`; None if not `weighted`.
        """
        return self.collectives.share_of_samples(label) if weighted else None

    def sum_of(self, flat: tf.Tensor, label: str) -> tf.Tensor:
        """Sums one bucket, a float32 `[n]`, over the ranks."""
        raise NotImplementedError

    def error(self, key: Key) -> tf.Tensor:
        """Errors of the step before, float32 of the key's size."""
        return tf.convert_to_tensor(self._variable(key))

    def keep(self, key: Key, error: tf.Tensor) -> None:
        """Keeps errors for the next step.

        Args:
            key: key of the errors.
            error: float32 of the key's size. Infinite and NaN errors are not
                added to the next step.
        """
        error = tf.where(tf.math.is_finite(error), error, 0)
        with tf.control_dependencies(self.checks()):
            self._variable(key).assign(error)

    def checks(self) -> list[tf.Tensor] | None:
        """Tensors that a write of a variable must wait for.

        A step that fails because of an invalid id changes no variable.
        """
        step = self.collectives.step
        return step.checks_here() if step else None

    def _errors_of_owners(self) -> _Errors:
        """Errors of the step's owners, as long as the first one exists."""
        step = self.collectives.step
        owners = (step.owners if step else ()) or [self]
        ids = tuple(map(id, owners))
        if ids not in self._errors:

            def forget(_: object) -> None:
                self._errors.pop(ids, None)

            self._errors[ids] = weakref.ref(owners[0], forget), {}
        return self._errors[ids][1]

    def _variable(self, key: Key) -> tf.Variable:
        errors = self._errors_of_owners()
        if key not in errors:
            label, occurrence, kind, size = key
            errors[key] = local_variable(
                lambda: tf.zeros([size]),
                f"error_of_{kind}/{label}/{occurrence}",
            )
        return errors[key]
