# SPDX-License-Identifier: Apache-2.0
"""The k candidates with the highest scores: of a rank's rows, and of all.

Queries travel to the candidates, of which there are more. Every rank scores
all queries against its rows and answers each with its k best; the rank of a
query takes the k best of these. Of equal scores the first candidate counts
first, as in one process, so positions travel with the scores.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfdist_ext.collectives.agreeing import agree
from tfdist_ext.collectives.collectives import Collectives

# Scores at a time, 64 MB.
CELLS = 1 << 24
# Queries at a time are a multiple of it: products of few queries are summed in
# another order, and a score shall not depend on who else asks.
_QUERIES = 16
# Where there is no candidate: behind all of them.
_NOWHERE = tf.int64.max


@dataclasses.dataclass(frozen=True)
class Part:
    """The candidates that a rank scores.

    Attributes:
        rows: `[m, dim]`.
        positions: int64 `[m]`, ascending, of each among all candidates.
        everywhere: whether every rank has all of them.
    """

    rows: tf.Tensor
    positions: tf.Tensor
    everywhere: bool


def scored(dtype: tf.DType) -> tf.DType:
    """The dtype of scores for queries of a dtype: at least single."""
    return dtype if dtype.size >= tf.float32.size else tf.float32


def best(
    queries: tf.Tensor,
    part: Part,
    k: int,
    collectives: Collectives | None,
    label: str,
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best candidates of all ranks; all of them must call.

    Args:
        queries: `[n, dim]`; n may differ between the ranks.
        part: what this rank scores.
        k: how many, at most as many as there are candidates.
        collectives: of the strategy.
        label: names the exchanges in errors.

    Returns:
        The scores, `[n, k]`, highest first, and int64 `[n, k]`, the positions
        of the candidates.

    Raises:
        tf.errors.InvalidArgumentError: on every rank, if they ask for
            different numbers, or with queries of different kinds.
    """
    if collectives is None or part.everywhere:
        return _best_here(queries, part, k)
    world_size = collectives.group.world_size
    dim, dtype = queries.shape[-1], queries.dtype.name
    agree(collectives, [f"search {label}: k={k}, queries {dtype} [n, {dim}]"])
    everyone, sizes = collectives.all_gather_parts(queries, f"{label}/queries")
    answers = _best_here(everyone, part, k)
    names = ("scores", "positions")
    scores, positions = (
        _by_query(
            collectives.all_to_all(answer, sizes, f"{label}/{name}")[0],
            (world_size, k),
        )
        for answer, name in zip(answers, names, strict=True)
    )
    # Of equal numbers, `top_k` takes the first.
    order = tf.argsort(positions, axis=1)
    scores = tf.gather(scores, order, batch_dims=1)
    positions = tf.gather(positions, order, batch_dims=1)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(positions, places, batch_dims=1)


def _by_query(answers: tf.Tensor, sizes: tuple[int, int]) -> tf.Tensor:
    """`[ranks * n, k]`, one rank after the other, as `[n, ranks * k]`."""
    ranks, k = sizes
    queries = tf.shape(answers)[0] // ranks
    answers = tf.reshape(answers, tf.stack([ranks, queries, k]))
    answers = tf.transpose(answers, [1, 0, 2])
    return tf.reshape(answers, tf.stack([queries, ranks * k]))


def _best_here(
    queries: tf.Tensor, part: Part, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best of a part, filled up with -inf where it has fewer than k."""
    asked, rows = tf.shape(queries)[0], tf.shape(part.rows)[0]
    queries = tf.pad(queries, [[0, -asked % _QUERIES], [0, 0]])
    number = tf.shape(queries)[0]
    block = tf.maximum(CELLS // tf.maximum(number, 1), 1)
    lowest = tf.constant(queries.dtype.as_numpy_dtype("-inf"), queries.dtype)
    nowhere = tf.constant(_NOWHERE, tf.int64)

    def more(
        first: tf.Tensor, scores: tf.Tensor, positions: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The best of what was found before and of a block of rows."""
        found = tf.matmul(
            queries,
            tf.cast(part.rows[first : first + block], queries.dtype),
            transpose_b=True,
        )
        # Above what fills up, so that it comes before that.
        found = tf.maximum(found, queries.dtype.min)
        # Rows of before come first: their positions are lower.
        scores, places = tf.math.top_k(tf.concat([scores, found], axis=1), k)
        new = tf.gather(part.positions, tf.maximum(first + places - k, 0))
        old = tf.gather(positions, tf.minimum(places, k - 1), batch_dims=1)
        return first + block, scores, tf.where(places < k, old, new)

    shapes = [tf.TensorShape([]), *[tf.TensorShape([None, k])] * 2]
    _, scores, positions = tf.while_loop(
        lambda first, *_: first < rows,
        more,
        (
            tf.constant(0),
            tf.fill(tf.stack([number, k]), lowest),
            tf.fill(tf.stack([number, k]), nowhere),
        ),
        shape_invariants=tuple(shapes),
        parallel_iterations=1,
    )
    return scores[:asked], positions[:asked]


def without(
    scores: tf.Tensor, ids: tf.Tensor, exclusions: tf.Tensor, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """The best of what is found that are not among some.

    Args:
        scores: `[n, m]`, highest first.
        ids: `[n, m]`, of what has them.
        exclusions: `[n, e]`, ids.
        k: how many, at most m.

    Returns:
        Scores and ids, `[n, k]`; scores are -inf where there are no more.
    """
    hit = tf.equal(ids[:, :, tf.newaxis], exclusions[:, tf.newaxis, :])
    lowest = tf.constant(scores.dtype.as_numpy_dtype("-inf"), scores.dtype)
    scores = tf.where(tf.reduce_any(hit, axis=2), lowest, scores)
    scores, places = tf.math.top_k(scores, k)
    return scores, tf.gather(ids, places, batch_dims=1)
