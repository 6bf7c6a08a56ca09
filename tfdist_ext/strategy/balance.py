# SPDX-License-Identifier: Apache-2.0
"""How ranks divide the samples of global batches: equally, or by shares.

Each rank takes contiguous samples, in the order of the ranks. Gradients, losses
and metrics are weighted by samples, so results do not depend on the shares.

Measured shares change when a step requests its batch, never earlier: only then
are all ranks at the same batch. Ranks agree on them at the first batch of each
iterator and at every `STEPS`-th. The shares are part of the iterator's state.
So they are the same on all ranks even if several iterators are read in turns,
or are dropped half-way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import batches
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.ops import group_ops
from tfdist_ext.strategy import speeds
from tfdist_ext.tables import checks
from tfdist_ext.type_names import Nest

# Batches after which ranks agree on measured shares.
STEPS = 200

_LOG = logging.getLogger("tfdist_ext")
# Numbers that a rank tells the others of its line; NaN if it has none.
_FIELDS = 3


def check(balance: str | Sequence[float], world_size: int, where: str) -> None:
    """Rejects an invalid argument `balance`.

    Args:
        balance: argument of the strategy.
        world_size: number of ranks.
        where: name of the class, for the error.

    Raises:
        ValueError: the error says what is valid.
    """
    if isinstance(balance, str):
        checks.one_of("balance", balance, checks.BALANCES, where)
        return
    try:
        shares = [float(share) for share in balance]
    except (TypeError, ValueError):
        raise ValueError(
            f"Argument `balance` must be one of {checks.BALANCES}, or a list "
            "of one share for each rank. Received: balance="
            f"{checks.brief(balance)} ({where})."
        ) from None
    what = ""
    if len(shares) != world_size:
        what = f"has {len(shares)} shares and there are {world_size} ranks"
    elif not all(math.isfinite(share) and share >= 0 for share in shares):
        what = "has a share that is negative or not finite"
    elif not 0 < math.fsum(shares) < math.inf:
        what = "has no share above 0"
    if what:
        raise ValueError(
            f"Argument `balance` {what}. Give each rank its share of a batch, "
            "a number of at least 0; shares are divided by their sum. "
            f"Received: balance={checks.brief(balance)} ({where})."
        )


class Balance:
    """The shares of the ranks of one strategy.

    Args:
        balance: argument of the strategy, see `check`.
        world_size: number of ranks.
    """

    def __init__(
        self, balance: checks.Balance | Sequence[float], world_size: int
    ) -> None:
        self._kind = "shares"
        if isinstance(balance, str):
            self._kind, given = balance, [1.0] * world_size
        else:
            given = [float(share) for share in balance]
        self._ends = speeds.ends_of(given)

    @property
    def is_equal(self) -> bool:
        """Whether all ranks get equally many samples."""
        return self._kind == "equal"

    @property
    def is_measured(self) -> bool:
        """Whether shares follow the measured speeds."""
        return self._kind == "measured"

    @property
    def shares(self) -> tuple[float, ...]:
        """Current share of each rank; their sum is 1."""
        return tuple(np.diff(self._ends).tolist())

    def describe(self) -> str:
        """A text that is the same on all ranks with equal arguments."""
        if self._kind == "shares":
            return ", ".join(f"{share:.6g}" for share in self.shares)
        return self._kind

    def part_of(self, batch: Nest, collectives: Collectives) -> Nest:
        """This rank's samples of a global batch, by shares that do not change.

        Args:
            batch: see `batches.slice_of_rank`.
            collectives: collectives of the strategy.
        """
        group = collectives.group
        if self.is_equal or self.is_measured:
            return batches.slice_of_rank(batch, group.rank, group.world_size)
        ends = tf.constant(self._ends[group.rank : group.rank + 2])
        by_ids = self._kind == "ids"
        samples, _ = batches.samples_between(batch, ends, by_ids)
        return batches.slice_of_rank(
            batch, group.rank, group.world_size, samples
        )

    def cut(
        self, dataset: tf.data.Dataset, collectives: Collectives, name: str
    ) -> tf.data.Dataset:
        """This rank's samples of global batches, by measured shares.

        Args:
            dataset: global batches.
            collectives: collectives of the strategy.
            name: name of the dataset in tags, equal on all ranks.
        """
        watch = speeds.Watch(STEPS)
        rank, ranks = collectives.group.rank, collectives.group.world_size

        def shares_of_next(
            ends: tf.Tensor, count: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor]:
            ends = tf.cond(
                count % STEPS == 0,
                lambda: self._agree(count, ends, watch, collectives, name),
                lambda: ends,
            )
            ends = tf.ensure_shape(ends, [ranks + 1])
            return ends, (count, ends)

        def cut_next(batch: Nest, shares: tuple[tf.Tensor, tf.Tensor]) -> Nest:
            count, ends = shares
            samples, work = batches.samples_between(
                batch, ends[rank : rank + 2], by_ids=True
            )
            part = batches.slice_of_rank(batch, rank, ranks, samples)
            flat = tf.nest.flatten(part, expand_composites=True)
            with tf.control_dependencies(flat):
                _note(count, work, watch, collectives)
            return part

        # Batches do not go through `scan`, which cannot have extension types.
        equal = tf.constant(speeds.ends_of([1.0] * ranks))
        shares = tf.data.Dataset.counter().scan(equal, shares_of_next)
        both = tf.data.Dataset.zip((dataset, shares))
        return both.map(cut_next, synchronous=True)

    def _agree(
        self,
        count: tf.Tensor,
        ends: tf.Tensor,
        watch: speeds.Watch,
        collectives: Collectives,
        name: str,
    ) -> tf.Tensor:
        """Ends of the shares from now on, `[W + 1]`, equal on all ranks.

        Rank 0 computes them from what all ranks have measured: another
        processor may round a sum differently.
        """
        ranks = collectives.group.world_size

        def measured() -> np.ndarray:
            line = watch.line()
            if line is None:
                return np.full([1, _FIELDS], np.nan)
            return np.array([[line.fixed, line.slope, line.samples]])

        def decide(
            count: int, ends: np.ndarray, lines: np.ndarray
        ) -> np.ndarray:
            # An iterator begins with the latest shares of any iterator.
            now = self._ends if count == 0 else ends
            if np.isnan(lines).any():
                return now[None]
            before = np.diff(now).tolist()
            found = speeds.divided([speeds.Line(*x) for x in lines], before)
            return now[None] if found == before else speeds.ends_of(found)[None]

        def adopt(ends: np.ndarray, lines: np.ndarray) -> None:
            if np.array_equal(ends, self._ends):
                return
            before, self._ends = self.shares, np.array(ends)
            collectives.rank_speeds = tuple(ranks * s for s in self.shares)
            if collectives.group.rank == 0:
                _log(before, self.shares, lines)

        own = tf.numpy_function(measured, [], tf.float64)
        own = tf.ensure_shape(own, [1, _FIELDS])
        lines = collectives.all_gather(own, f"{name}/speeds")
        found = tf.numpy_function(decide, [count, ends, lines], tf.float64)
        found = tf.ensure_shape(found, [1, ranks + 1])
        found = collectives.all_gather(found, f"{name}/shares")[0]
        tf.numpy_function(adopt, [found, lines], [])
        return found


def _note(
    count: tf.Tensor,
    work: tf.Tensor,
    watch: speeds.Watch,
    collectives: Collectives,
) -> None:
    """Records, whenever it runs, that a step has got its batch."""

    def note(count: int, work: int, waited: float) -> None:
        watch.note(int(count), int(work), time.monotonic(), float(waited))

    waited = group_ops.waited(collectives.group.handle)
    tf.numpy_function(note, [count, work, waited], [])


def _log(
    before: Sequence[float], found: Sequence[float], lines: np.ndarray
) -> None:
    """Logs new shares, with the times that they follow from."""
    for rank, (share, was) in enumerate(zip(found, before, strict=True)):
        fixed, slope, samples = lines[rank]
        _LOG.info(
            "tfdist_ext: rank %d takes %.1f %% of each batch, in place of "
            "%.1f %%. A step took it %.1f ms without waiting.",
            *(rank, 100 * share, 100 * was),
            1e3 * (fixed + slope * samples),
        )
