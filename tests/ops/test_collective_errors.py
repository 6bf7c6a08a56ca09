# SPDX-License-Identifier: Apache-2.0
"""How collectives fail, on ranks that are threads of this process."""

import re

import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops


@pytest.mark.parametrize("world_size", [2, 4])
def test_user_error_of_one_rank_is_raised_on_all(world_size):
    def run(group):
        rows = 30_000
        x = tf.ones([rows * world_size])
        wrong = rows + (group.rank == 1)
        messages = []
        for call in (
            lambda: collective_ops.all_to_all(
                group, x, [wrong] * world_size, tag=2, label="layer a"
            ),
            lambda: collective_ops.all_reduce(
                group,
                [x],
                tag=4,
                label="layer b",
                weight=-1.0 if group.rank == 1 else 1.0,
            ),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError) as error:
                call()
            messages.append(error.value.message)
        # The group goes on.
        output, _ = collective_ops.all_to_all(
            group, x, [rows] * world_size, tag=2, label="layer a"
        )
        assert output.shape == x.shape
        return messages

    for splits, weight in run_on_ranks(world_size, run):
        assert re.search(r"'layer a': rank 1: send_splits.* 30001", splits)
        assert re.search(r"'layer b': rank 1: weight must be .* -1", weight)


def test_different_ops_under_one_tag_name_ranks_and_ops():
    def run(group):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            if group.rank == 1:
                collective_ops.all_gather(
                    group, tf.zeros([70_000], tf.int64), tag=2, label="emb"
                )
            else:
                collective_ops.all_reduce(
                    group, [tf.zeros([70_000])], tag=2, label="dense"
                )
        return error.value.message

    for message in run_on_ranks(2, run):
        assert "all_reduce 'dense'" in message
        assert "all_gather 'emb'" in message
        assert "rank 0 (127.0.0.1:7000)" in message
        assert "rank 1 (127.0.0.1:7001)" in message


def test_different_shapes_in_an_all_reduce():
    def run(group):
        x = tf.zeros([100_000 + group.rank])
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            collective_ops.all_reduce(group, [x], tag=2, label="dense")
        return error.value.message

    for message in run_on_ranks(2, run):
        assert "400000 bytes" in message
        assert "400004 bytes" in message


@pytest.mark.parametrize(
    ("shapes", "named"),
    [
        ([[2, 1, 32], [1, 33, 1]], ["[2,1,32]", "[1,33,1]"]),
        ([[2, 3], [3, 2]], ["[2,3]", "[3,2]"]),
        ([[400, 300], [300, 400]], ["[400,300]", "[300,400]"]),
    ],
)
def test_equal_sizes_of_other_shapes(shapes, named):
    def run(group):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            collective_ops.all_reduce(
                group, [tf.zeros(shapes[group.rank])], tag=2, label="dense"
            )
        return error.value.message

    for message in run_on_ranks(2, run):
        assert all(shape in message for shape in named), message


@pytest.mark.parametrize("size", [3, 500_000])
def test_a_weight_on_one_rank_only(size):
    def run(group):
        weight = tf.constant(1.0) if group.rank else None
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            collective_ops.all_reduce(
                group, [tf.zeros([size])], tag=2, label="a", weight=weight
            )
        return error.value.message

    for message in run_on_ranks(2, run):
        assert re.search(r"rank 1 \([^)]*\) runs .*weighted", message), message


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_give_the_first_reason_of_a_mismatch(world_size):
    def run(group):
        for step in range(5):
            last = step == 4 and group.rank == world_size - 1
            try:
                collective_ops.all_reduce(
                    group, [tf.zeros([2 if last else 3])], tag=2, label="a"
                )
            except tf.errors.OpError as error:
                return error.message.partition("failed: ")[2].split(" [")[0]
        raise AssertionError("no rank has noticed")

    for _ in range(10):
        reasons = set(run_on_ranks(world_size, run))
        assert len(reasons) == 1, reasons
        assert "disagree" in reasons.pop()


def test_weighted_sum_needs_a_floating_dtype():
    def run(group):
        with pytest.raises(tf.errors.InvalidArgumentError, match="int32"):
            collective_ops.all_reduce(
                group, [tf.zeros([2], tf.int32)], tag=2, weight=1.0
            )
        return True

    assert run_on_ranks(2, run) == [True, True]


def test_failure_inside_of_a_function_is_unavailable():
    """Also below calls and loops, which TensorFlow wraps in other ops."""

    def run(group):
        @tf.function
        def inner(x):
            return collective_ops.all_reduce(group, [x], tag=2, label="in")[0]

        @tf.function
        def outer(x):
            for _ in tf.range(3):
                x = inner(x)
            return x

        outer(tf.ones([2]))
        if group.rank == 1:
            return None
        with pytest.raises(tf.errors.UnavailableError, match="'in'") as error:
            outer(tf.ones([2]))
        return error.value.message

    message, _ = run_on_ranks(2, run)
    assert "rank 1 (127.0.0.1:7001) has closed its process group" in message


def test_op_without_its_group():
    class Closed:
        rank, world_size, handle = 0, 2, 12345

    with pytest.raises(tf.errors.FailedPreconditionError, match="12345"):
        collective_ops.barrier(Closed(), tag=2)


def test_a_weighted_sum_has_no_gradient():
    def run(group):
        x = tf.ones([3])
        with tf.GradientTape() as tape:
            tape.watch(x)
            (total,) = collective_ops.all_reduce(
                group, [x], tag=2, label="layer a", weight=0.5
            )
        with pytest.raises(NotImplementedError, match=r"'layer a'.*plain sum"):
            tape.gradient(total, x)
        return total.numpy().tolist()

    assert run_on_ranks(2, run) == [[2.0] * 3] * 2


def test_a_broadcast_of_too_many_dimensions_fails_on_all():
    def run(group):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            collective_ops.broadcast(
                group, tf.ones([1] * 16), root=1, tag=2, label="layer a"
            )
        (total,) = collective_ops.all_reduce(
            group, [tf.ones([])], tag=2, label="layer a"
        )
        assert total == 2
        return error.value.message

    for message in run_on_ranks(2, run):
        assert re.search(r"'layer a': rank 1: input has 16 dimen", message)
