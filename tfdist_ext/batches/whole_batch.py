# SPDX-License-Identifier: Apache-2.0
"""Makes of a rank's part of a batch what one process makes of the whole.

In Keras's loops a step is written as for one process, and the ranks are
averaged: a gradient or a logged value is the mean of what the ranks have,
weighed by their samples. That is right for every mean over the samples, a
loss by Keras or by hand. Sums over the samples are multiplied by
`samples of all ranks / samples of this rank` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.batches.divisors import Divisor
from tfdist_ext.batches.sum_or_mean import MEAN
from tfdist_ext.batches.sum_or_mean import BatchGrowth
from tfdist_ext.batches.sum_or_mean import Term
from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.collectives.step import Step


def keras_step() -> Step | None:
    """The step of a Keras loop at several ranks that is traced or run now.

    None also where every rank computes on the whole batch.
    """
    current = keras_loop_step()
    if current is None or current.checking or current.whole:
        return None
    return current


def keras_loop_step() -> Step | None:
    """The step of a Keras loop at several ranks, whatever it computes on."""
    collectives = collectives_lib.active()
    current = collectives.step if collectives else None
    return current if current is not None and current.weighted else None


def share() -> tf.Tensor:
    """This rank's part of the step's samples, float32 in [0, 1]."""
    collectives = collectives_lib.active()
    assert collectives is not None and collectives.step is not None
    known = collectives.step.shares
    graph = _graph_of_shares()
    if graph not in known:
        relative = collectives.share_of_samples("batch")
        assert relative is not None
        known[graph] = relative / collectives.group.world_size
    return known[graph]


def know_share(value: tf.Tensor) -> None:
    """Says what `share` is where an exchange has told it."""
    step = keras_loop_step()
    assert step is not None
    step.shares.setdefault(_graph_of_shares(), value)


def _graph_of_shares() -> int:
    if tf.executing_eagerly():
        return 0
    return id(tf.compat.v1.get_default_graph())


def means_of(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The ranks' means of numbers, weighted by their samples.

    Args:
        values: scalars; one of a rank without samples does not count.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    parts = [value / collectives.group.world_size for value in values]
    return collectives.all_reduce(parts, "batch/values", weighted=True)


def ratio_of_parts(
    value: tf.Tensor, divisor: Divisor | None = None
) -> tf.Tensor:
    """This rank's part of a divisor of all ranks, by its part of the samples.

    A sum that is divided by this rank's divisor, times this: the ranks'
    average of that is divided by the divisor of all.

    Args:
        value: float32 scalar, this rank's part of a sum.
        divisor: what is made of the sum; None for the sum.
    """
    collectives = collectives_lib.active()
    assert collectives is not None
    own = samples()
    total, of_all = collectives.all_reduce([value, own], "batch/divisor")
    divisor = divisor or Divisor(value)
    ratio = divisor.of(value) * of_all
    return tf.math.divide_no_nan(ratio, divisor.of(total) * own)


def samples() -> tf.Tensor:
    """float32 scalar, this rank's samples in the step."""
    collectives = collectives_lib.active()
    assert collectives is not None
    return collectives.samples()


def growth_in(step: Step) -> BatchGrowth:
    """What tells sums over the step's batch from means."""
    if step.growth is None:
        samples = tf.get_static_value(step.samples)
        step.growth = BatchGrowth(samples and int(samples))
    growth: BatchGrowth = step.growth
    return growth


def sums_in(step: Step, value: tf.Tensor) -> list[Term]:
    """The sums over samples in a value, as far as can be told.

    Eager scalars do not tell what they are; they count as means.
    """
    if not tf.is_symbolic_tensor(value):
        return [Term(value)] if value.shape.rank else []
    return growth_in(step).sums_in(value)


def averageable(value: tf.Tensor) -> tf.Tensor:
    """A scalar whose weighed mean over the ranks is one process's value."""
    value = tf.convert_to_tensor(value)  # also of a variable of Keras
    step = keras_step()
    terms = sums_in(step, value) if step else []
    for term in terms:
        if term.value is value and term.divisor is None:
            value = total_of(value)
        else:
            value += excess(term) * term.value
    return value


def excess(term: Term) -> tf.Tensor:
    """How often a sum has to be added to the value that contains it."""
    if term.divisor is None:
        more = tf.math.reciprocal_no_nan(share()) - 1.0
    else:
        more = _ratio(term.divisor) - 1.0
    more = tf.cast(more, term.value.dtype)
    return more if term.factor is None else term.factor * more


def _ratio(divisor: Divisor) -> tf.Tensor:
    """`ratio_of_parts`, exchanged once for what is divided by the same."""
    step = keras_step()
    assert step is not None
    known = growth_in(step).ratios
    part = divisor.part
    graph = tf.compat.v1.get_default_graph()
    place = id(graph), id(part.graph), part.op.name
    if place not in known:
        single = dataclasses.replace(
            divisor,
            least=_single(divisor.least),
            more=_single(divisor.more),
        )
        known[place] = ratio_of_parts(tf.cast(part, tf.float32), single)
    return known[place]


def _single(value: tf.Tensor | None) -> tf.Tensor | None:
    return None if value is None else tf.cast(value, tf.float32)


def total_of(value: tf.Tensor) -> tf.Tensor:
    """A sum over this rank's samples, to be averaged over the ranks."""
    value = tf.math.divide_no_nan(value, tf.cast(share(), value.dtype))
    if tf.is_symbolic_tensor(value):
        marks.set_growth(value, MEAN)
    return value
