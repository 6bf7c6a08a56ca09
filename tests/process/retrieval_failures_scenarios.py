# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in retrieval on one rank is told to all, at once."""

import time

import numpy as np
import tensorflow as tf
from retrieval_scenarios import DIM
from retrieval_scenarios import ROWS
from retrieval_scenarios import check
from retrieval_scenarios import queries_of
from retrieval_scenarios import start
from retrieval_scenarios import whole_numbers

from tfdist_ext.layers import Embedding
from tfdist_ext.layers import ShardedTopK
from tfdist_ext.losses import Retrieval
from tfdist_ext.losses import gather_candidates


def told(strategy, cases):
    """`run(fails)` of each, by texts, fails on the last rank: all say so."""
    last = strategy.world_size - 1
    for texts, run in cases.items():
        begin, found = time.monotonic(), "nothing"
        try:
            run(strategy.rank == last)
            strategy.collectives.barrier("after it")
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        assert time.monotonic() - begin < 30, f"{texts}: told by a timeout"
        texts = [texts] if isinstance(texts, str) else [*texts]
        if strategy.rank != last:
            texts += [f"rank {last} ("]
        for text in texts:
            assert text in found, (text, found)
        # And the ranks are in step.
        (count,) = strategy.collectives.all_reduce([tf.ones([])], "in step")
        assert int(count) == strategy.world_size


def searches(strategy, folder):
    """Other queries and numbers of results, and no candidates, on one."""
    queries, table = queries_of(strategy), whole_numbers(7, ROWS, DIM)
    with strategy.scope():
        layer = Embedding(ROWS, DIM, start(7), sharding="row_wise")
        layer.build(None)
        index = ShardedTopK(k=3).index(layer)
        given, empty = ShardedTopK(table, k=3), ShardedTopK()

    @tf.function(reduce_retracing=True)
    def in_step(k):
        return strategy.run(lambda: index(queries, k=k))

    def exclude(count, extra=()):
        excluded = np.zeros([len(queries), *extra, count], np.int64)
        return index.query_with_exclusions(queries, excluded)

    told(
        strategy,
        {
            "5 columns": lambda f: index(queries[:, f:]),
            ("different plans", "k=4"): lambda f: index(queries, k=3 + f),
            ("different plans", "k=5"): lambda f: in_step(4 + f),
            "Received: k=40": lambda f: given(queries, k=40 if f else 3),
            "positional arguments": lambda f: index("all" if f else queries),
            "different": lambda f: index(
                queries.astype("int64" if f else "float32")
            ),
            "must be [n, m]": lambda f: exclude(2, [1] if f else []),
            ("k=5", "k=6", "with equal arguments"): lambda f: exclude(2 + f),
            "no candidates": lambda f: (empty if f else given).gather(),
        },
    )
    check(index(queries), queries, table, 3)
    check(given(queries), queries, table, 3)


def indexes(strategy, folder):
    """Other candidates and identifiers, data and towers that fail, on one."""
    queries, table = queries_of(strategy), whole_numbers(7, ROWS, DIM)
    ids = np.arange(ROWS)
    titles = np.array([f"title {i}" for i in ids])
    with strategy.scope():
        layer = Embedding(ROWS, DIM, start(7), sharding="row_wise")
        layer.build(None)
        index = ShardedTopK(k=3)

    def data(fails):
        def make():
            for first in range(0, ROWS, 8):
                if fails and first:
                    raise OSError("no such file")
                yield table[first : first + 8]

        rows = tf.TensorSpec([None, DIM])
        return tf.data.Dataset.from_generator(make, output_signature=rows)

    def tower(rows):
        if strategy.rank == strategy.world_size - 1:
            raise RuntimeError("a tower of others")
        return rows

    def other(wrong, right):
        return lambda f: index.index(*(wrong if f else right))

    whole, batches = (table, ids), data(False)
    told(
        strategy,
        {
            ("(20, 5)", "different plans"): other([table[:20]], [table]),
            ("(23, 4)", "with equal arguments"): other([table[:, 1:]], [table]),
            "float64": other([tf.cast(table, "float64")], [table]),
            "(5,)": other([table[0]], [table]),
            "int64 [20]": other((table, ids[:20]), whole),
            ("int64 [23]", "identifiers"): other((table, ids + 1), whole),
            "string [23]": other((table, titles), whole),
            "identifiers: None": other([table], whole),
            "of Embedding": other([layer], [table]),
            "rows: int64": lambda f: index.index(layer, rows=ids[f : 4 + f]),
            "no such file": lambda f: index.index_from_dataset(data(f)),
            "2 batches": lambda f: index.index_from_dataset(
                batches.take(2 if f else 3)
            ),
            ("OSError", "no such file"): lambda f: index.index_from_dataset(
                data(f), lambda rows: rows
            ),
            "a tower of others": lambda f: index.index_from_dataset(
                batches, tower
            ),
        },
    )
    check(index.index(layer)(queries), queries, table, 3)


def losses(strategy, folder):
    """In steps of one's own, run by hand and as a graph."""
    x = tf.constant(whole_numbers(strategy.rank, 4, DIM))
    ids = tf.range(4)
    task = Retrieval(remove_accidental_hits=True)

    def user(fails, x):
        if fails:
            raise OSError("no such file")
        return gather_candidates(x)

    def masked(fails, x):
        mask = tf.ones([4, 4 * strategy.world_size - fails], tf.bool)
        return task(x, x, candidate_ids=ids, score_mask=mask)

    steps = {
        "float32 [n, 4]": lambda f, x: gather_candidates(x[:, f:]),
        "float64": lambda f, x: gather_candidates(
            tf.cast(x, "float64" if f else "float32")
        ),
        "a scalar": lambda f, x: gather_candidates(x[0, 0] if f else x),
        "no such file": user,
        "needs `candidate_ids`": lambda f, x: task(
            x, x, candidate_ids=None if f else ids
        ),
    }

    def eager(step):
        return lambda f: strategy.run(lambda x: step(f, x), (x,))

    def graph(step):
        return lambda f: tf.function(lambda: eager(step)(f))()

    for kind in (eager, graph):
        told(strategy, {texts: kind(step) for texts, step in steps.items()})
    # After all exchanges: others learn it by the next.
    told(strategy, {"score_mask": eager(masked)})
    rows = strategy.run(gather_candidates, (x,))
    assert rows.shape == [4 * strategy.world_size, DIM]
