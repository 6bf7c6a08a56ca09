# SPDX-License-Identifier: Apache-2.0
"""The task of a rank in `collectives`: one collective and size after another.

Stock and ours live in the same process and take turns, so that whatever else
the machine does meets both alike. Each collective is four small functions:
what a rank puts in, what must come out, stock's call and ours.
"""

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import measure
from benchmarks import rank

# Groups of TF's collective runtime are numbers; strategies count from 1 up.
_STOCK_GROUP = 7_000_000

# Values are small integers: sums in fp32 are exact in any order.
_PERIOD = 1000


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective as its input, its expected output and two calls."""

    make_input: Callable[[int, int, int], np.ndarray]
    expected: Callable[[int, int, int], np.ndarray]
    stock: Callable[..., Callable[[tf.Tensor], tf.Tensor]]
    hybrid: Callable[..., Callable[[tf.Tensor], tf.Tensor]]


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Returns per collective and size the quantiles of stock and ours."""
    context.barrier("started")
    strategies = _make_strategies(context)
    records = []
    for name, numbers in context.options["sweep"]:
        collective = COLLECTIVES[name]
        calls = {
            side: getattr(collective, side)(strategy, context.ranks)
            for side, strategy in strategies.items()
            if strategy is not None
        }
        records.append(_measure(context, name, numbers, calls))
    return {"records": records}


def _make_strategies(context: rank.RankContext) -> dict[str, Any]:
    strategies: dict[str, Any] = dict.fromkeys(("stock", "hybrid"))
    if "stock" in context.options["sides"]:  # first of all that TensorFlow does
        strategies["stock"] = tf.distribute.MultiWorkerMirroredStrategy()
    if "hybrid" in context.options["sides"]:
        import tfdist_ext

        strategies["hybrid"] = tfdist_ext.HybridParallelStrategy(
            cluster_resolver=_own_cluster(context)
        )
    return strategies


def _own_cluster(
    context: rank.RankContext,
) -> tf.distribute.cluster_resolver.ClusterResolver:
    """The ranks on another port: TensorFlow's server has that of TF_CONFIG."""
    with socket.create_server((context.hosts[context.rank], 0)) as free:
        port = context.agree("port", free.getsockname()[1])
    workers = [f"{host}:{port + i}" for i, host in enumerate(context.hosts)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}),
        task_type="worker",
        task_id=context.rank,
    )


def _measure(
    context: rank.RankContext,
    name: str,
    numbers: int,
    calls: dict[str, Callable[[tf.Tensor], tf.Tensor]],
) -> dict[str, Any]:
    collective = COLLECTIVES[name]
    shape = (context.rank, context.ranks, numbers)
    value = tf.constant(collective.make_input(*shape))
    want = collective.expected(*shape)
    record: dict[str, Any] = {"collective": name, "numbers": numbers}
    record["error"] = 0.0
    seconds: dict[str, list[float]] = {side: [] for side in calls}
    for side, call in calls.items():
        error = float(np.abs(call(value).numpy() - want).max())
        if error:
            raise rank.CheckError(
                f"{name} of {numbers} numbers, {side}: wrong by {error}"
            )
    for turn in range(context.options["turns"]):
        for side, call in calls.items():
            context.barrier(f"{name}-{numbers}-{turn}-{side}")
            seconds[side] += _timed(
                context, f"{name}-{numbers}-{turn}-{side}", call, value
            )
    for side, durations in seconds.items():
        record[side] = measure.quantiles_ms(durations)
    return record


def _timed(
    context: rank.RankContext,
    name: str,
    call: Callable[[tf.Tensor], tf.Tensor],
    value: tf.Tensor,
) -> list[float]:
    def step(_: int) -> None:
        call(value)

    warm_up = measure.time_steps(step, 2)
    options = context.options
    steps = measure.steps_in_budget(
        warm_up[1:], options["seconds"] / options["turns"], 100, least=3
    )
    return measure.time_steps(step, context.agree(name, steps))


def _reduce_input(rank_: int, ranks: int, numbers: int) -> np.ndarray:
    del ranks
    return (np.arange(numbers) % _PERIOD + rank_).astype(np.float32)


def _reduced(rank_: int, ranks: int, numbers: int) -> np.ndarray:
    del rank_
    members = range(ranks)
    return np.sum([_reduce_input(r, ranks, numbers) for r in members], axis=0)


def _exchange_input(rank_: int, ranks: int, numbers: int) -> np.ndarray:
    """Row j, for rank j, is recognisable by sender and receiver."""
    row = np.arange(numbers) % _PERIOD + ranks * rank_
    return (row + np.arange(ranks)[:, None]).astype(np.float32)


def _exchanged(rank_: int, ranks: int, numbers: int) -> np.ndarray:
    return np.stack(
        [_exchange_input(r, ranks, numbers)[rank_] for r in range(ranks)]
    )


def _all_reduce(
    strategy: tf.distribute.Strategy, ranks: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """As a user calls it, the same for stock and ours."""
    del ranks

    def replica(value: tf.Tensor) -> tf.Tensor:
        # Stock asks a tensor for its device, which an argument has not.
        value = tf.identity(value)
        replica_context = tf.distribute.get_replica_context()
        return replica_context.all_reduce(tf.distribute.ReduceOp.SUM, value)

    @tf.function
    def call(value: tf.Tensor) -> tf.Tensor:
        reduced = strategy.run(replica, args=(value,))
        return strategy.experimental_local_results(reduced)[0]

    return call


def _stock_all_to_all(
    strategy: tf.distribute.Strategy, ranks: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """TF's collective runtime; no strategy offers it."""
    del strategy

    @tf.function
    def call(value: tf.Tensor) -> tf.Tensor:
        return tf.raw_ops.CollectiveAllToAllV2(
            input=value,
            group_size=ranks,
            group_key=_STOCK_GROUP,
            instance_key=value.shape[1],
            ordering_token=[],
        )

    return call


def _hybrid_all_to_all(
    strategy: Any, ranks: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    @tf.function
    def call(value: tf.Tensor) -> tf.Tensor:
        splits = tf.ones([ranks], tf.int64)
        received, _ = strategy.collectives.all_to_all(
            value, splits, f"bench{value.shape[1]}"
        )
        return received

    return call


COLLECTIVES = {
    "all_reduce": Collective(_reduce_input, _reduced, _all_reduce, _all_reduce),
    "all_to_all": Collective(
        _exchange_input, _exchanged, _stock_all_to_all, _hybrid_all_to_all
    ),
}
