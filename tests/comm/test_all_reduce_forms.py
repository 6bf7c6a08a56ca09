# SPDX-License-Identifier: Apache-2.0
"""Sums directly, around a ring and along a tree: which, and that they agree."""

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.ops import collective_ops

# Of rounding a sum once, whatever the ranks added up before.
ROUNDED = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 1e-6}
DTYPES = (*ROUNDED, "float64", "int32", "int64")


def values(rank, count, dtype):
    generator = np.random.default_rng(100 * rank + count)
    if dtype.startswith("int"):
        return tf.constant(generator.integers(-9, 9, count), dtype)
    return tf.cast(generator.normal(size=count), dtype)


def cases(counts):
    """Count, dtype and weight of each rank, if they are weighted."""
    for count in counts:
        for dtype in DTYPES:
            yield count, dtype, None
        for dtype in ("float32", "bfloat16"):
            yield count, dtype, lambda rank: float(rank % 3)
    yield 5, "float32", lambda _: 0.0


def exact(world_size, count, dtype, weight):
    weights = [weight(rank) if weight else 1.0 for rank in range(world_size)]
    scale = world_size / (sum(weights) or 1) if weight else 1
    parts = [
        np.asarray(values(rank, count, dtype), np.float64) * factor
        for rank, factor in enumerate(weights)
    ]
    return scale * np.sum(parts, axis=0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 11, 16])
@pytest.mark.parametrize("form", ["direct", "ring", "tree"])
def test_all_ranks_get_the_same_bits(form, world_size):
    """Of nothing, less than a number per rank, and several segments."""
    counts = (0, 7, 5000, 600_000) if world_size == 3 else (0, 7, 5000)

    def sums(group):
        results = []
        for tag, (count, dtype, weight) in enumerate(cases(counts)):
            x = values(group.rank, count, dtype)
            (total,) = collective_ops.all_reduce(
                group,
                [x],
                tag=2 * tag,
                weight=weight and weight(group.rank),
            )
            results.append(total.numpy())
        return results

    by_rank = run_on_ranks(world_size, sums, timeout=60, all_reduce=form)
    for case, *totals in zip(cases(counts), *by_rank, strict=True):
        for total in totals[1:]:
            assert total.tobytes() == totals[0].tobytes(), case
        np.testing.assert_allclose(
            totals[0].astype(np.float64),
            exact(world_size, *case),
            rtol=1.001 * ROUNDED.get(case[1], 1e-12),
            atol=1e-5,
            err_msg=str(case),
        )


@pytest.mark.parametrize("form", ["ring", "tree"])
def test_a_rank_of_weight_0_counts_for_nothing(form):
    def total(group):
        x = tf.fill([5000], np.nan if group.rank == 1 else 2.0)
        (result,) = collective_ops.all_reduce(
            group, [x], tag=2, weight=0.0 if group.rank == 1 else 3.0
        )
        return result.numpy()

    for result in run_on_ranks(3, total, all_reduce=form):
        np.testing.assert_allclose(result, 6.0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 11])
@pytest.mark.parametrize("form", ["direct", "ring", "tree"])
@pytest.mark.parametrize("equal", [True, False])
def test_the_last_tensors_may_have_no_weight(form, world_size, equal):
    """Of one number, within a chunk, over several chunks and segments."""
    many = 300_000 if world_size == 3 else 5000
    sizes = [(3, 1), (5000, 7), (7, 5000), (many, many), (many, 0), (0, 9)]
    of_rank = [2.0 if equal else float(rank % 3) for rank in range(world_size)]

    def sums(group):
        weight = of_rank[group.rank]
        results = []
        for dtype in ("float32", "bfloat16", "float64"):
            for first, last in sizes:
                gradient = values(group.rank, first, dtype)
                if weight == 0:
                    gradient = tf.fill([first], tf.cast(np.nan, dtype))
                state = values(group.rank + 50, last, dtype)
                results.append(
                    collective_ops.all_reduce(
                        group,
                        [gradient, state],
                        tag=2 * len(results),
                        weight=weight,
                        unweighted=1,
                    )
                )
        return results

    by_rank = run_on_ranks(world_size, sums, timeout=60, all_reduce=form)
    cases = [
        (dtype, *each)
        for dtype in ("float32", "bfloat16", "float64")
        for each in sizes
    ]
    for (dtype, first, last), *found in zip(cases, *by_rank, strict=True):
        rounded = {
            "rtol": 1.001 * ROUNDED.get(dtype, 1e-12),
            "atol": 1e-5,
            "err_msg": f"{dtype} {first} {last}",
        }
        weighted = exact(world_size, first, dtype, of_rank.__getitem__)
        plain = np.sum(
            [
                np.asarray(values(rank + 50, last, dtype), np.float64)
                for rank in range(world_size)
            ],
            axis=0,
        )
        for gradient, state in found:
            np.testing.assert_allclose(
                gradient.numpy().astype(np.float64), weighted, **rounded
            )
            np.testing.assert_allclose(
                state.numpy().astype(np.float64), plain, **rounded
            )
            assert state.numpy().tobytes() == found[0][1].numpy().tobytes()


@pytest.mark.parametrize("form", ["ring", "tree"])
@pytest.mark.parametrize("world_size", [2, 6])
def test_an_error_of_one_rank_is_told_by_all(form, world_size):
    def total(group):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="rank 1: weight must be fini"
        ):
            collective_ops.all_reduce(
                group,
                [tf.ones([3])],
                tag=2,
                weight=-1.0 if group.rank == 1 else 1.0,
            )
        # The ranks are in step.
        return float(collective_ops.all_reduce(group, [tf.ones([])], tag=2)[0])

    results = run_on_ranks(world_size, total, all_reduce=form)
    assert results == [world_size] * world_size


@pytest.mark.parametrize(
    ("forms", "sizes"),
    [
        (["direct", "tree", "tree"], [5, 5, 5]),
        (["tree", "tree", "tree", "ring", "tree"], [5] * 5),
        (["ring", "direct", "tree"], [5] * 3),
        (["tree"] * 5, [5, 5, 6, 5, 5]),
        (["tree"] * 4, [5, 6, 6, 5]),
        (["ring"] * 3, [5, 5, 6]),
    ],
    ids=str,
)
def test_ranks_that_differ_are_named_by_all(forms, sizes):
    def total(group):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            collective_ops.all_reduce(
                group, [tf.ones([sizes[group.rank]])], tag=2, label="sum"
            )
        return str(error.value).partition("ranks disagree")[2]

    differ = {*forms} if len({*forms}) > 1 else {"[5]", "[6]"}
    texts = run_on_ranks(len(forms), total, timeout=60, all_reduce=forms)
    assert len(set(texts)) == 1, texts
    first, _, second = texts[0].partition("), rank ")
    for side in (first, second):
        assert side.count("runs all_reduce 'sum'") == 1, texts[0]
        assert sum(f", {word}" in side for word in differ) == 1, texts[0]
    ends = (side.rpartition(" bytes")[2] for side in (first, second))
    assert len({end.partition(")")[0] for end in ends}) == 2, texts[0]


@pytest.mark.parametrize(
    ("world_size", "per_host", "count", "messages"),
    [
        (2, 2, 4, 1),
        (8, 8, 4, 7),  # all to all
        (16, 16, 1000, 4),  # a tree
        (4, 4, 1 << 20, 3 * (1 + 2)),  # chunks of two segments
        (4, 2, 1 << 20, 3 + 2 * 3 * 2),  # a ring: half of it within a host
        (4, 2, 4, 3),
        (4, 1, 22_500, 3 * 2),  # a tree would send a third more bytes
    ],
)
def test_the_cheapest_form_is_chosen(world_size, per_host, count, messages):
    def sent(group):
        collective_ops.all_reduce(group, [tf.ones([count])], tag=2)
        return group.stats().messages_sent

    assert (
        run_on_ranks(world_size, sent, timeout=60, per_host=per_host)
        == [messages] * world_size
    )


def test_a_form_that_is_none_is_refused():
    with pytest.raises(ValueError, match="TFDIST_ALL_REDUCE=star"):
        ProcessGroup(0, 1, all_reduce="star")
