# SPDX-License-Identifier: Apache-2.0
"""Rounds of `ASP`: updates are held back until they are significant."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import deferred_rows
from tfdist_ext.embedding.sharded_variable import local_variable
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.strategy.local_rounds import LocalRound
from tfdist_ext.strategy.local_rounds import component
from tfdist_ext.strategy.round_base import Apply
from tfdist_ext.strategy.round_base import Pairs
from tfdist_ext.strategy.round_base import Steps
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Variable

_FLAGS = "consistency/flags"
_WEIGHTS = "consistency/weights"
# Numbers that are counted: variables and rows that were judged, and of these
# the ones that were held back.
_COUNTS = ("dense", "dense held", "rows", "rows held")


class SignificantRound(LocalRound):
    """Local steps, after which significant updates are sent.

    Dense weights move on every rank by its own gradients, as in `LocalSteps`.
    A variable that has moved far enough on any rank since all ranks had the
    same value becomes the mean of their values. Gradients of rows are kept on
    the rank that computed them, and a row is sent when its sum is large enough.

    Args:
        steps: what the rounds of the strategy have in common.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__(steps, None, {})
        self._samples_of: dict[int, tf.Variable] = {}
        self._counts = local_variable(
            lambda: tf.zeros([len(_COUNTS)], tf.float64), "held_back"
        )

    def _before_update(self) -> None:
        if self._steps.collectives is None:
            return
        for key, variable in self._trained.items():
            if key not in self._samples_of:
                native = component(variable)
                self._starts[key] = local_variable(
                    native.read_value, "last_sent", beside=variable
                )
                self._samples_of[key] = local_variable(
                    lambda: tf.zeros([]), "samples_since_sent"
                )

    def _after_update(
        self,
        kept: Pairs,
        samples: tf.Tensor,
        optimizer: Optimizer,
        apply: Apply,
    ) -> None:
        for each in self._samples_of.values():
            each.assign_add(samples)
        self._send_rows(kept, optimizer, apply)
        if self._trained:
            self._send_dense(None)

    def is_complete(self) -> bool:
        """Whether the model may be saved: what is held back is sent first."""
        return True

    def held_back(self) -> tf.Tensor:
        """float64 `[4]`, the numbers of `_COUNTS` of this rank."""
        return self._counts.read_value()

    def _finish(self, optimizer: Optimizer, apply: Apply) -> None:
        """Sends everything that is held back."""
        self._apply_rows(self._kept.pairs(), optimizer, apply)
        self._kept.clear()
        if self._trained:
            self._send_dense(tf.ones([len(self._trained)]))
        self._count.assign(0)
        self._samples.assign(0)

    def _send_dense(self, flags: tf.Tensor | None) -> None:
        """Takes the means of the variables that have moved on any rank.

        Args:
            flags: float32, not 0 for the variables to send; None decides.
        """
        collectives = self._steps.collectives
        if collectives is None:
            return
        keys = list(self._trained)
        mine = tf.stack([self._samples_of[key].read_value() for key in keys])
        decides = flags is None
        if flags is None:
            flags = tf.stack([self._has_moved(key) for key in keys])
        # Samples are sent with the flags, in one exchange.
        both = tf.concat([flags, mine], 0)
        total = collectives.all_reduce([both], _FLAGS)[0]
        samples = total[len(keys) :]
        # Without samples since the last time, all ranks have the same value.
        chosen = (total[: len(keys)] > 0) & (samples > 0)
        shares = tf.math.divide_no_nan(mine, samples)
        if decides:
            held = tf.reduce_sum(tf.cast(~chosen, tf.float64))
            self._count_held(0, float(len(keys)), held)
        internals.run_if(
            tf.reduce_any(chosen), lambda: self._take_means(chosen, shares)
        )

    def _has_moved(self, key: int) -> tf.Tensor:
        """1 if the variable has moved significantly on this rank, else 0."""
        value = component(self._trained[key]).read_value()
        start = self._starts[key].read_value()
        limit = self._steps.mode.significance * tf.norm(start)
        # A NaN is sent.
        return tf.cast(~(tf.norm(value - start) <= limit), tf.float32)

    def _take_means(self, chosen: tf.Tensor, shares: tf.Tensor) -> None:
        """Gives all ranks the means of some variables, in one exchange."""
        collectives = self._steps.collectives
        assert collectives is not None
        parts, sizes = [], []
        for i, variable in enumerate(self._trained.values()):
            weight = component(variable)
            part = tf.cond(
                chosen[i],
                lambda w=weight, share=shares[i]: _flat(
                    tf.math.multiply_no_nan(
                        w.read_value(), tf.cast(share, w.dtype)
                    )
                ),
                lambda: tf.zeros([0]),
            )
            parts.append(tf.reshape(part, [-1]))
            sizes.append(tf.size(parts[-1]))
        total = collectives.all_reduce([tf.concat(parts, 0)], _WEIGHTS)[0]
        means = tf.split(total, tf.stack(sizes), num=len(sizes))
        for i, (key, variable) in enumerate(self._trained.items()):
            tf.cond(
                chosen[i],
                lambda k=key, v=variable, mean=means[i]: self._take(k, v, mean),
                lambda: False,
            )

    def _take(self, key: int, variable: Variable, mean: tf.Tensor) -> bool:
        weight = component(variable)
        value = tf.cast(tf.reshape(mean, weight.shape), weight.dtype)
        weight.assign(value)
        self._starts[key].assign(value)
        self._samples_of[key].assign(0)
        return True

    def _send_rows(
        self, kept: Pairs, optimizer: Optimizer, apply: Apply
    ) -> None:
        """Sends the rows of the step whose sums have become significant."""
        collectives = self._steps.collectives
        if collectives is None or not kept:
            return
        sums = self._kept.pairs()
        rows_of = {
            id(value_of(v)): without_duplicates(g).indices for g, v in kept
        }
        asked = [
            (deferred_rows.chosen_slices(total, rows_of[id(value_of(v))]), v)
            for total, v in sums
            if id(value_of(v)) in rows_of
        ]
        norms = deferred_rows.norms_of_rows(asked, collectives)
        sent = []
        for (slices, variable), norm in zip(asked, norms, strict=True):
            own = marks.own_optimizer(variable) or optimizer
            update = tf.norm(slices.values, axis=1) * rate_of(own)
            limit = self._steps.mode.significance * norm
            enough = ~(update <= limit)
            count = tf.cast(tf.size(enough), tf.float64)
            held = tf.reduce_sum(tf.cast(~enough, tf.float64))
            self._count_held(2, count, held)
            rows = tf.boolean_mask(slices.indices, enough)
            sent.append((deferred_rows.chosen_slices(slices, rows), variable))
        self._kept.remove([(g.indices, v) for g, v in sent])
        self._apply_rows(sent, optimizer, apply)

    def _count_held(
        self, place: int, judged: tf.Tensor, held: tf.Tensor
    ) -> None:
        counts = tf.scatter_nd(
            [[place], [place + 1]],
            tf.stack([tf.cast(judged, tf.float64), held]),
            [len(_COUNTS)],
        )
        self._counts.assign_add(counts)


def _flat(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(value, tf.float32), [-1])


def shares_held_back(counts: Sequence[float]) -> dict[str, float]:
    """Logs of what was held back, from `SignificantRound.held_back`."""
    dense, dense_held, rows, rows_held = map(float, counts)
    return {
        "dense_held_back": dense_held / max(dense, 1.0),
        "rows_held_back": rows_held / max(rows, 1.0),
    }


def rate_of(optimizer: Optimizer) -> tf.Tensor:
    """The learning rate of the current step, float32."""
    rate = optimizer.learning_rate
    if callable(rate) and not isinstance(rate, tf.Variable):
        rate = rate(optimizer.iterations)
    return tf.cast(tf.convert_to_tensor(rate), tf.float32)
