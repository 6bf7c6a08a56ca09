# SPDX-License-Identifier: Apache-2.0
"""Collectives against NumPy, on ranks that are threads of this process."""

import random
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops

WORLD_SIZES = [1, 2, 4]
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)
both_modes = pytest.mark.parametrize("graph", [False, True])
EXCHANGED = ["uint8", "int32", "int64", "float32", "float64"]
EXCHANGED += ["bfloat16", "float16"]
SUMMED = [name for name in EXCHANGED if name != "uint8"]


def as_mode(function, graph):
    return tf.function(function) if graph else function


def numbers(rank, shape, dtype="float32", limit=100):
    generator = np.random.default_rng([rank, *shape])
    return tf.cast(generator.integers(0, limit, shape), dtype)


def concatenate_for(rank, tensors, splits):
    """What `rank` gets of everyone's `tensors` split by `splits`."""
    parts = []
    for tensor, own in zip(tensors, splits, strict=True):
        start = sum(own[:rank])
        parts.append(tensor[start : start + own[rank]])
    return np.concatenate([np.asarray(part, np.float64) for part in parts])


@every_world_size
@both_modes
@pytest.mark.parametrize("dtype", EXCHANGED)
def test_all_to_all(world_size, graph, dtype):
    splits = [
        [(rank * 3 + peer * 5) % 7 for peer in range(world_size)]
        for rank in range(world_size)
    ]
    tensors = [
        numbers(rank, (sum(splits[rank]), 2, 3), dtype)
        for rank in range(world_size)
    ]

    def exchange(group):
        function = as_mode(
            lambda x, s: collective_ops.all_to_all(group, x, s, tag=2), graph
        )
        for _ in range(3):
            result = function(tensors[group.rank], splits[group.rank])
        return result

    for rank, (output, received) in enumerate(
        run_on_ranks(world_size, exchange)
    ):
        expected = concatenate_for(rank, tensors, splits)
        np.testing.assert_array_equal(np.asarray(output, np.float64), expected)
        assert received.numpy().tolist() == [s[rank] for s in splits]
        assert output.dtype == tf.as_dtype(dtype)


@every_world_size
def test_rows_of_no_bytes_are_counted(world_size):
    def exchange(group):
        rows = 5 + group.rank
        _, gathered = collective_ops.all_gather(
            group, tf.zeros([rows, 0]), tag=2
        )
        splits = tf.range(world_size, dtype=tf.int64) + group.rank
        output, received = collective_ops.all_to_all(
            group, tf.zeros([tf.reduce_sum(splits), 0]), splits, tag=4
        )
        return gathered, output.shape, received

    for rank, (gathered, shape, received) in enumerate(
        run_on_ranks(world_size, exchange)
    ):
        assert gathered.numpy().tolist() == [5 + r for r in range(world_size)]
        expected = [rank + peer for peer in range(world_size)]
        assert received.numpy().tolist() == expected
        assert shape == (sum(expected), 0)


@every_world_size
def test_all_to_all_sizes_change_from_call_to_call(world_size):
    """Frames grow, shrink below their capacity, and exceed the largest."""
    sizes = [0, 1, 900, 3, 70_000, 0, 20_000, 300_000, 5, 70_000, 1, 300_000]

    def exchange(group):
        outputs = []
        for step, size in enumerate(sizes):
            splits = [
                size if (peer + group.rank + step) % 3 else 0
                for peer in range(world_size)
            ]
            x = tf.fill([sum(splits)], float(group.rank + 10 * step))
            outputs.append(collective_ops.all_to_all(group, x, splits, tag=2))
        return outputs

    for rank, outputs in enumerate(run_on_ranks(world_size, exchange)):
        for step, (output, received) in enumerate(outputs):
            expected = [
                sizes[step] if (rank + peer + step) % 3 else 0
                for peer in range(world_size)
            ]
            assert received.numpy().tolist() == expected
            np.testing.assert_array_equal(
                output, np.repeat(np.arange(world_size) + 10.0 * step, expected)
            )


@every_world_size
@both_modes
@pytest.mark.parametrize("dtype", EXCHANGED)
def test_all_gather(world_size, graph, dtype):
    tensors = [numbers(rank, (rank, 3), dtype) for rank in range(world_size)]

    def gather(group):
        function = as_mode(
            lambda x: collective_ops.all_gather(group, x, tag=2), graph
        )
        return function(tensors[group.rank])

    expected = np.concatenate([np.asarray(t, np.float64) for t in tensors])
    for output, splits in run_on_ranks(world_size, gather):
        np.testing.assert_array_equal(np.asarray(output, np.float64), expected)
        assert splits.numpy().tolist() == list(range(world_size))


@every_world_size
@both_modes
@pytest.mark.parametrize("dtype", SUMMED)
@pytest.mark.parametrize("rows", [1, 7, 5_000, 400_000])
def test_all_reduce(world_size, graph, dtype, rows):
    """Small and large, one tensor and a bucket, whole numbers are exact."""
    limit = 8 if dtype == "bfloat16" else 100
    shapes = [(rows,), (3, 5), (0, 4), ()]
    tensors = [
        [numbers(rank, shape, dtype, limit) for shape in shapes]
        for rank in range(world_size)
    ]

    def reduce(group):
        bucket = as_mode(
            lambda *x: collective_ops.all_reduce(group, x, tag=2), graph
        )
        single = as_mode(
            lambda x: collective_ops.all_reduce(group, [x], tag=4)[0], graph
        )
        own = tensors[group.rank]
        return bucket(*own), single(own[0])

    for bucket, single in run_on_ranks(world_size, reduce):
        for i, total in enumerate([*bucket, single]):
            parts = [own[i % len(shapes)] for own in tensors]
            expected = sum(np.asarray(part, np.float64) for part in parts)
            np.testing.assert_array_equal(
                np.asarray(total, np.float64), expected
            )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [100, 300_001])
def test_all_reduce_is_bitwise_equal(world_size, dtype, rows):
    tensors = [
        tf.cast(np.random.default_rng(rank).normal(size=rows), dtype)
        for rank in range(world_size)
    ]

    def reduce(group):
        return collective_ops.all_reduce(group, [tensors[group.rank]], tag=2)

    totals = [
        np.asarray(total) for (total,) in run_on_ranks(world_size, reduce)
    ]
    for total in totals[1:]:
        assert total.tobytes() == totals[0].tobytes()
    exact = sum(np.asarray(tensor, np.float64) for tensor in tensors)
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    np.testing.assert_allclose(
        np.asarray(totals[0], np.float64), exact, atol=tolerance * 4
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("rows", [30_000, 4_300_000])
def test_all_reduce_again(world_size, rows):
    """Frames grow after the first call; large chunks reuse their window."""
    tensors = [
        [numbers(3 * rank + call, (rows,), "float32", 100) for call in range(3)]
        for rank in range(world_size)
    ]

    def reduce(group):
        return [
            collective_ops.all_reduce(group, [tensor], tag=2)[0]
            for tensor in tensors[group.rank]
        ]

    expected = np.sum(tensors, axis=0)
    for totals in run_on_ranks(world_size, reduce):
        for total, call in zip(totals, expected, strict=True):
            np.testing.assert_array_equal(total, call)


@every_world_size
@both_modes
@pytest.mark.parametrize("rows", [10, 200_000])
@pytest.mark.parametrize("equal", [True, False])
def test_weighted_all_reduce(world_size, graph, rows, equal):
    weights = [8.0 if equal else float(rank) for rank in range(world_size)]
    tensors = [
        np.random.default_rng(rank).normal(size=rows).astype(np.float32)
        for rank in range(world_size)
    ]

    def reduce(group):
        function = as_mode(
            lambda x, w: collective_ops.all_reduce(
                group, [x, x[:1]], tag=2, weight=w
            ),
            graph,
        )
        own = tensors[group.rank]
        if weights[group.rank] == 0:
            own = np.full_like(own, np.nan)
        return function(tf.constant(own), tf.constant(weights[group.rank]))

    total = sum(weights)
    expected = sum(
        np.float64(x) * weight * world_size / (total or 1)
        for x, weight in zip(tensors, weights, strict=True)
    )
    for whole, first in run_on_ranks(world_size, reduce):
        np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
        assert first.numpy() == whole.numpy()[:1]


@every_world_size
@pytest.mark.parametrize("rows", [3, 100_000])
def test_all_weights_zero(world_size, rows):
    def reduce(group):
        return collective_ops.all_reduce(
            group, [tf.fill([rows], np.nan)], tag=2, weight=0.0
        )[0]

    for total in run_on_ranks(world_size, reduce):
        np.testing.assert_array_equal(total, np.zeros(rows))


@every_world_size
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (500, 400)])
def test_broadcast_takes_the_shape_of_the_root(world_size, shape):
    root = world_size - 1

    def broadcast(group):
        own = group.rank == root
        x = numbers(9, shape) if own else tf.zeros([1])
        return collective_ops.broadcast(group, x, root=root, tag=2)

    for result in run_on_ranks(world_size, broadcast):
        np.testing.assert_array_equal(result, numbers(9, shape))


@every_world_size
def test_barrier_waits_for_the_last(world_size):
    arrived = []

    def wait(group):
        @tf.function
        def barrier():
            collective_ops.barrier(group, tag=2)

        if group.rank == 0:
            time.sleep(0.3)
            arrived.append("late")
        barrier()
        return list(arrived)

    assert run_on_ranks(world_size, wait) == [["late"]] * world_size


@every_world_size
def test_gradients(world_size):
    """Of a function of all outputs on all ranks, against finite sums."""
    splits = [
        [2 + (rank + peer) % 3 for peer in range(world_size)]
        for rank in range(world_size)
    ]
    tensors = [
        numbers(rank, (sum(splits[rank]), 2)) for rank in range(world_size)
    ]

    def gradients(group):
        scale = float(group.rank + 1)
        x = tf.Variable(tensors[group.rank])
        with tf.GradientTape(persistent=True) as tape:
            sent, _ = collective_ops.all_to_all(
                group, x, splits[group.rank], tag=2
            )
            gathered, _ = collective_ops.all_gather(group, x, tag=4)
            reduced = collective_ops.all_reduce(group, [x[:1], x[1:2]], tag=6)
            losses = [
                scale * tf.reduce_sum(sent),
                scale * tf.reduce_sum(gathered**2),
                scale * tf.reduce_sum(reduced[0]) + tf.reduce_sum(reduced[1]),
            ]
        return [tf.convert_to_tensor(tape.gradient(loss, x)) for loss in losses]

    total = sum(range(1, world_size + 1))
    for rank, (sent, gathered, reduced) in enumerate(
        run_on_ranks(world_size, gradients)
    ):
        scales = np.repeat(np.arange(world_size) + 1.0, splits[rank])
        np.testing.assert_array_equal(sent, np.stack([scales, scales], 1))
        np.testing.assert_allclose(gathered, 2 * total * tensors[rank])
        expected = np.zeros_like(tensors[rank])
        expected[0] = total
        expected[1] = world_size
        np.testing.assert_array_equal(reduced, expected)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_on_any_rank(world_size, seed):
    """Ops that do not depend on each other, in another order on each rank.

    More of them than TensorFlow has threads: none may block one.
    """
    count = 40

    def run(group):
        order = list(range(count))
        random.Random(seed * 10 + group.rank).shuffle(order)

        @tf.function
        def everything(x):
            results = [None] * count
            for i in order:
                size = 1 + 977 * (i % 5) ** 4
                own = x + tf.fill([size * world_size], float(i))
                if i % 3 == 0:
                    splits = tf.fill([world_size], size)
                    results[i], _ = collective_ops.all_to_all(
                        group, own, splits, tag=2 * i
                    )
                elif i % 3 == 1:
                    (results[i],) = collective_ops.all_reduce(
                        group, [own], tag=2 * i
                    )
                else:
                    results[i], _ = collective_ops.all_gather(
                        group, own, tag=2 * i
                    )
            return [tf.reduce_mean(result) for result in results]

        for _ in range(3):
            means = everything(tf.constant(float(group.rank)))
        return [float(mean) for mean in means]

    average = (world_size - 1) / 2
    for means in run_on_ranks(world_size, run):
        for i, mean in enumerate(means):
            factor = world_size if i % 3 == 1 else 1
            assert mean == pytest.approx((average + i) * factor, rel=1e-5)
