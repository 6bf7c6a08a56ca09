# SPDX-License-Identifier: Apache-2.0
"""When ranks exchange what they train: the `consistency` of a strategy."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

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
    Partitioned tables are exchanged and updated in every step, as with `BSP`,
    unless `tables` is True.

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
    With `outer`: Douillard et al., DiLoCo, 2023, arXiv:2311.08105. With
    `row_cache`: Miao et al., HET: Scaling out Huge Embedding Model Training
    via Cache-enabled Distributed Framework, PVLDB 15(2), 2021,
    arXiv:2112.07221; there, each row is refreshed by a clock of its own, as
    with `SSP`.

    Args:
        k: number of steps of a round, at least 1.
        outer: optimizer that applies the mean of the ranks' updates; None
            applies the mean itself.
        tables: whether rows of partitioned tables are updated once in a
            round as well. Lookups still read rows from their owners in every
            step. Each rank adds up the gradients that it computes, by row,
            and sends each row once at the end of the round. The owner adds
            up those of all ranks, and the optimizer makes one update with
            the sum over the steps.
        row_cache: whether a rank also reads a row from its owner only once in
            a round, and then has a copy of it. Rows do not change within a
            round, so this changes bytes and memory, not numbers. It acts on
            features whose rows are deduplicated, which the planner chooses
            for features of one id per sample, and not on prefetched ids and
            dynamic vocabularies. Rows that the program itself assigns within
            a round are read after it. It needs `tables=True`.

    Raises:
        ValueError: `k` is not an integer of at least 1, `tables` or
            `row_cache` is not a boolean, or `row_cache` is given without
            `tables`.
        TypeError: `outer` is not None or a `Nesterov`.
    """

    k: int
    outer: Nesterov | None = None
    tables: bool = False
    row_cache: bool = False

    def __post_init__(self) -> None:
        checks.integer("k", self.k, 1, "LocalSteps")
        checks.boolean("tables", self.tables, "LocalSteps", optional=False)
        checks.boolean(
            "row_cache", self.row_cache, "LocalSteps", optional=False
        )
        if self.row_cache and not self.tables:
            raise ValueError(
                "Argument `row_cache` needs rows that change only where rounds "
                "end. Received: row_cache=True with tables=False (LocalSteps). "
                "Use tables=True, or leave row_cache out."
            )
        if self.outer is not None and not isinstance(self.outer, Nesterov):
            raise TypeError(
                "Argument `outer` of LocalSteps must be None or a "
                "tfdist_ext.consistency.Nesterov. Received: "
                f"outer={checks.brief(self.outer)}."
            )


@dataclasses.dataclass(frozen=True)
class ASP:
    """Sends updates when they are significant (approximately synchronous).

    Dense layers: in a step, each rank updates the dense weights by the
    gradient of its own samples. When a variable has moved on any rank by more
    than `significance` times its norm, since all ranks had the same value, it
    becomes the mean of the ranks' values, weighted by their samples since
    then. In between, the ranks' values differ.

    Partitioned tables: each rank adds up the gradients of a row that it
    computes, and sends the sum to the owner of the row when the learning rate
    times the norm of the sum is more than `significance` times the norm of
    the row at its owner. This is judged in the steps in which the rank has a
    gradient of the row.

        strategy = tfdist_ext.HybridParallelStrategy(
            consistency=tfdist_ext.consistency.ASP(0.01)
        )

    Everything that is held back is sent at the end of an epoch of `fit`, and
    before a model is evaluated, saved or exported. All ranks then have the
    same model. The logs of `fit` have `dense_held_back` and `rows_held_back`,
    the shares of variables and rows that were judged and not sent.

    Source: Hsieh et al., Gaia: Geo-Distributed Machine Learning Approaching
    LAN Speeds, NSDI 2017. There, all updates of a parameter are held back by
    data centers; here, by ranks.

    Args:
        significance: smallest norm of an update that is sent, relative to the
            norm of what it changes; at least 0. With 0 everything that
            changes is sent in every step.

    Raises:
        ValueError: `significance` is negative or not a number.
    """

    significance: float

    # Gradients of rows stay on their ranks, as with `LocalSteps(tables=True)`.
    tables: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.number("significance", self.significance, "ASP")


_SCALES = ("none", "inverse")


@dataclasses.dataclass(frozen=True)
class SSP:
    """Lets ranks run up to `staleness` steps ahead of the slowest.

    No step waits for all ranks. Every row of a table and every dense variable
    has an owner. In a step, a rank asks the owners for rows, computes, and
    sends the gradients of its own samples to the owners. Each owner applies
    them at once. A rank waits only before it would be more than `staleness`
    steps ahead of the slowest rank (stale synchronous parallel).

        strategy = tfdist_ext.HybridParallelStrategy(
            consistency=tfdist_ext.consistency.SSP(4)
        )

    Pauses of ranks then do not add up. A rank that is always slower still
    sets the pace: give it fewer samples with `balance="measured"`.

    The optimizer makes an update for the gradient of each rank, so as many
    updates in a step as there are ranks. The gradients of a step have the sum
    that `BSP` applies at once. Optimizers that divide gradients by their size,
    such as Adam, therefore move weights more often by as much: divide their
    learning rate. `SSP(0)` runs the same steps as `BSP`.

    Sources: Ho et al., More Effective Distributed ML via a Stale Synchronous
    Parallel Parameter Server, NIPS 2013. With `stale_scale="inverse"`: Zhang
    et al., Staleness-Aware Async-SGD for Distributed Deep Learning, IJCAI
    2016, arXiv:1511.05950. With `row_cache`: Miao et al., HET, see
    `LocalSteps`.

    Args:
        staleness: steps that a rank may be ahead, at least 0.
        stale_scale: "inverse" divides a gradient by how many steps old the
            values are that it was computed from, if more than one. "none"
            applies it as it is.
        row_cache: whether a rank answers its lookups from its own copy of a
            row while the copy has the updates of all but the last `staleness`
            steps, which is what the owner guarantees too. A copy lacks later
            updates, also those of this rank. The rank also adds up its
            gradients of a row, and sends the sum once, `staleness // 2` steps
            after the first of them. Ranks may then be ahead, and copies be
            used, by the other half of the steps, so that the bound stays
            that of all updates. Rows are read less often by the share
            `row_cache_hits`, in the logs of `fit` and in
            `strategy.statistics()`. It acts on features whose rows are
            deduplicated, which the planner chooses for features of one id per
            sample, and not on dynamic vocabularies. Rows that the program
            itself assigns are read after `strategy.synchronize()`.

    Raises:
        ValueError: an argument is out of bounds, or `row_cache` is given with
            `stale_scale="inverse"`.
    """

    staleness: int
    stale_scale: str = "none"
    row_cache: bool = False

    def __post_init__(self) -> None:
        checks.integer("staleness", self.staleness, 0, "SSP")
        checks.one_of("stale_scale", self.stale_scale, _SCALES, "SSP")
        checks.boolean("row_cache", self.row_cache, "SSP", optional=False)
        if self.row_cache and self.stale_scale == "inverse":
            raise ValueError(
                'Argument `stale_scale` is "inverse", for which owners count '
                "how old the rows of a gradient are. They do not know it of "
                "copies. Received: row_cache=True (SSP). Leave one of the two "
                "out."
            )


@dataclasses.dataclass(frozen=True)
class BAP:
    """Lets ranks run ahead of each other without a bound.

    Like `SSP`, but no rank ever waits for another one in a step (bounded by
    nothing, asynchronous parallel). Ranks synchronize at the end of every
    epoch of `fit`, and before a model is evaluated, saved or exported.

    Sources: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012; see
    `SSP` for `stale_scale`.

    Args:
        stale_scale: see `SSP`.

    Raises:
        ValueError: `stale_scale` is unknown.
    """

    stale_scale: str = "none"

    def __post_init__(self) -> None:
        checks.one_of("stale_scale", self.stale_scale, _SCALES, "BAP")


Consistency = BSP | Accumulate | LocalSteps | ASP | SSP | BAP

__all__ = ["ASP", "BAP", "BSP", "SSP", "Accumulate", "LocalSteps", "Nesterov"]


def effective(mode: Consistency, several: bool) -> Consistency:
    """The mode that trains: `BSP` where no rank can be ahead of another.

    Args:
        mode: the strategy's `consistency`.
        several: whether there are several ranks.
    """
    if isinstance(mode, SSP) and mode.staleness == 0:
        return BSP()
    return mode if several or not is_asynchronous(mode) else BSP()


def is_asynchronous(mode: Consistency) -> bool:
    """Whether ranks may be in different steps."""
    return isinstance(mode, BAP) or (
        isinstance(mode, SSP) and mode.staleness > 0
    )


def bounds_of(mode: Consistency) -> tuple[int | None, int]:
    """How far ranks may be apart, and how long gradients wait, in steps.

    A rank that has completed `t` steps then gets rows with the updates of the
    first `t - staleness` steps of every rank.

    Args:
        mode: an asynchronous mode.

    Returns:
        Steps that a rank may be ahead, None for no bound, and steps for which
        gradients of rows with copies wait.
    """
    if not isinstance(mode, SSP):
        return None, 0
    delay = mode.staleness // 2 if mode.row_cache else 0
    return mode.staleness - delay, delay


def checked(value: object) -> Consistency:
    """The `consistency` of a strategy; None stands for `BSP()`.

    Raises:
        TypeError: the value is of another kind.
    """
    if value is None:
        return BSP()
    if isinstance(value, Consistency):
        return value
    raise TypeError(
        "Argument `consistency` must be an object of tfdist_ext.consistency: "
        "BSP(), Accumulate(k), LocalSteps(k), ASP(significance), SSP(s) or "
        "BAP(). Received: "
        f"consistency={checks.brief(value)} (HybridParallelStrategy)."
    )
