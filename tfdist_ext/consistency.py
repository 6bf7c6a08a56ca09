# SPDX-License-Identifier: Apache-2.0
"""When ranks exchange what they train: the `consistency` of a strategy."""

from __future__ import annotations

import dataclasses

from tfdist_ext.tables import checks


@dataclasses.dataclass(frozen=True)
class BSP:
    """Exchanges and applies the gradients of every step; the default.

    Every step is that of one process with the global batch (bulk synchronous
    parallel).

    Source: Valiant, A Bridging Model for Parallel Computation, Communications
    of the ACM 33(8), 1990.
    """


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Sums the gradients of `k` steps, then exchanges and applies them once.

    The result is that of one process with batches `k` times larger. Dense
    gradients are sent once in `k` steps. Gradients of table rows are sent to
    the ranks that own the rows in every step, and are summed there.

        strategy = tfdist_ext.HybridParallelStrategy(
            consistency=tfdist_ext.consistency.Accumulate(4)
        )

    Fewer than `k` steps are applied at the end of an epoch of `fit`, and
    before a model is evaluated, saved or exported.

    In `fit` and `train_on_batch`, steps are weighted by their samples. In a
    custom training loop, the sum of the gradients is divided by `k`, so a loss
    that is divided by the global batch size is divided by `k` times that.

    Source: Dekel et al., Optimal Distributed Online Prediction Using
    Mini-Batches, Journal of Machine Learning Research 13, 2012.

    Args:
        k: number of steps, at least 1.

    Raises:
        ValueError: `k` is not an integer of at least 1.
    """

    k: int

    def __post_init__(self) -> None:
        checks.integer("k", self.k, 1, "Accumulate")


@dataclasses.dataclass(frozen=True)
class Nesterov:
    """Outer optimizer of `LocalSteps`: gradient descent with momentum.

    The outer gradient of a weight is its value at the start of the round,
    minus the mean of the ranks' values at the end. With it,

        velocity = momentum * velocity + gradient
        weight = start - learning_rate * (gradient + momentum * velocity)

    The velocities are variables of the optimizer, so checkpoints have them.

    Source: the outer optimizer of Douillard et al., DiLoCo: Distributed
    Low-Communication Training of Language Models, 2023, arXiv:2311.08105.

    Args:
        learning_rate: factor of the outer gradient, above 0.
        momentum: share of the velocity that is kept, at least 0 and below 1.

    Raises:
        ValueError: an argument is out of bounds.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        checks.number(
            "learning_rate", self.learning_rate, "Nesterov", least=1e-12
        )
        checks.number("momentum", self.momentum, "Nesterov")
        if self.momentum >= 1:
            raise ValueError(
                "Argument `momentum` must be below 1, or the velocity would "
                f"grow without limit. Received: momentum={self.momentum} "
                "(Nesterov)."
            )


@dataclasses.dataclass(frozen=True)
class LocalSteps:
    """Trains dense layers for `k` steps on every rank, then takes their mean.

    In a step, each rank updates the dense weights by the gradient of its own
    samples, and sends none of it. After `k` steps (a round) each weight
    becomes the mean of the ranks' values, weighted by the samples that they
    have trained in the round. So dense layers send 1 / k of the bytes.
    Partitioned tables are exchanged and updated in every step, as with `BSP`.

        strategy = tfdist_ext.HybridParallelStrategy(
            consistency=tfdist_ext.consistency.LocalSteps(8)
        )

    The optimizer's slots of dense weights stay on their rank during training.
    A round ends early at the end of an epoch of `fit`, and before a model is
    evaluated, saved or exported. The slots then become the mean of the ranks'
    slots too, so all ranks save the same model.

    Sources: McMahan et al., Communication-Efficient Learning of Deep Networks
    from Decentralized Data, AISTATS 2017, arXiv:1602.05629; Stich, Local SGD
    Converges Fast and Communicates Little, ICLR 2019, arXiv:1805.09767.
    With `outer`: Douillard et al., DiLoCo, 2023, arXiv:2311.08105.

    Args:
        k: number of steps of a round, at least 1.
        outer: optimizer that applies the mean of the ranks' updates; None
            applies the mean itself.

    Raises:
        ValueError: `k` is not an integer of at least 1.
        TypeError: `outer` is not None or a `Nesterov`.
    """

    k: int
    outer: Nesterov | None = None

    def __post_init__(self) -> None:
        checks.integer("k", self.k, 1, "LocalSteps")
        if self.outer is not None and not isinstance(self.outer, Nesterov):
            raise TypeError(
                "Argument `outer` of LocalSteps must be None or a "
                "tfdist_ext.consistency.Nesterov. Received: "
                f"outer={checks.brief(self.outer)}."
            )


Consistency = BSP | Accumulate | LocalSteps

__all__ = ["BSP", "Accumulate", "LocalSteps", "Nesterov"]


def checked(value: object) -> Consistency:
    """The `consistency` of a strategy; None stands for `BSP()`.

    Raises:
        TypeError: the value is of another kind.
    """
    if value is None:
        return BSP()
    if isinstance(value, BSP | Accumulate | LocalSteps):
        return value
    raise TypeError(
        "Argument `consistency` must be an object of tfdist_ext.consistency: "
        "BSP(), Accumulate(k) or LocalSteps(k). Received: "
        f"consistency={checks.brief(value)} (HybridParallelStrategy)."
    )
