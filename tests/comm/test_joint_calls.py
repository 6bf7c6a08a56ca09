# SPDX-License-Identifier: Apache-2.0
"""What all ranks do together: one rank's failure ends it on all of them."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.ops import collective_ops


def total(group, value, tag=2, label="sum", size=1):
    """The sum over the ranks of a vector that is full of `value`."""
    (result,) = collective_ops.all_reduce(
        group, [tf.fill([size], float(value))], tag=tag, label=label
    )
    return float(result.numpy()[-1])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_rank_that_leaves_ends_what_waits_for_it(world_size, size):
    def program(group):
        assert total(group, group.rank, size=size) == sum(range(world_size))
        start = time.monotonic()
        if group.rank == 1:
            group.leave("the disk is full")
        else:
            with pytest.raises(tf.errors.AbortedError) as error:
                total(group, 1, size=size)
            for part in ("rank 1 (", "the disk is full", "'sum'"):
                assert part in str(error.value), str(error.value)
            assert group.left()[1]
            group.leave("sum failed")
        assert time.monotonic() - start < 10
        # In step again, with the same tag.
        return [total(group, group.rank, size=size) for _ in range(3)]

    expected = [sum(range(world_size))] * 3
    assert (
        run_on_ranks(world_size, program, timeout=30) == [expected] * world_size
    )


def test_ranks_that_leave_again_and_again_stay_in_step():
    """What all took part in ends well on all, however soon a rank leaves."""
    rounds, world_size = 30, 3
    rng = np.random.default_rng(0)
    leavers = rng.integers(0, world_size, rounds)
    sizes = rng.choice([1, 5000, 300_000], rounds)
    calls = rng.integers(1, 4, rounds)

    def program(group):
        done = []
        for leaver, size, count in zip(leavers, sizes, calls, strict=True):
            tags = 2 * np.arange(1, count + 1)
            done += [total(group, 1, tag, size=int(size)) for tag in tags]
            if group.rank != leaver:
                with pytest.raises(tf.errors.AbortedError, match="round"):
                    total(group, 1, 2, size=int(size))
            group.leave("round")
        return done

    for done in run_on_ranks(world_size, program, timeout=60):
        assert done == [3.0] * int(calls.sum())


def exchange_beside(group, generation):
    """What a thread of one generation exchanges: two numbers of each rank."""
    return collective_ops.all_to_all(
        group,
        tf.fill([4], group.rank),
        tf.constant([2, 2]),
        tag=4,
        label="beside",
        generation=generation,
    )[0]


def test_what_runs_beside_a_call_ends_with_it():
    """A thread that is late must not take part in the next generation."""

    def program(group):
        first = group.generation

        def exchange(generation=first):
            return exchange_beside(group, generation)

        np.testing.assert_array_equal(exchange(), [0, 0, 1, 1])
        if group.rank == 1:
            group.leave("the disk is full")
        else:
            with pytest.raises(tf.errors.AbortedError, match="the disk is"):
                exchange()
            # The program itself has not failed yet.
            reason, reported = group.left()
            assert "the disk is full" in reason
            assert not reported
            group.leave("done")
        assert group.generation == first + 1
        # Only one rank makes this exchange, which must not wait for the other.
        if group.rank == 0:
            with pytest.raises(tf.errors.AbortedError, match="has failed"):
                exchange()
        return exchange(group.generation).numpy().tolist()

    assert run_on_ranks(2, program, timeout=30) == [[0, 0, 1, 1]] * 2


def test_what_runs_beside_a_call_has_no_deadline():
    """Nor does the call wait for it, as seen in the statistics."""

    def program(group):
        if group.rank == 1:
            time.sleep(4)
        return exchange_beside(group, 0).numpy().tolist(), group.stats().waited

    ended = run_on_ranks(2, program, timeout=0.5)  # five times that is less
    assert ended == [([0, 0, 1, 1], (0.0, 0.0))] * 2


def test_the_first_cause_is_told_by_all():
    """Rank 2 waits for rank 1, which has left because of rank 0."""

    def program(group):
        if group.rank == 0:
            group.leave("first")
            return "first"
        with pytest.raises(tf.errors.AbortedError) as error:
            total(group, 1)
        group.leave(f"failed on rank {group.rank}")
        return str(error.value)

    for text in run_on_ranks(3, program):
        assert "first" in text and "failed on rank" not in text


def test_operations_of_the_rank_that_leaves_end_too():
    def program(group):
        if group.rank == 0:
            errors = []

            def background():
                try:
                    total(group, 1, tag=4, label="background")
                except tf.errors.AbortedError as error:
                    errors.append(str(error))

            thread = threading.Thread(target=background)
            thread.start()
            time.sleep(0.5)  # it waits for rank 1
            group.leave("own reason")
            thread.join(20)
            return errors
        while not group.left()[0]:
            time.sleep(0.01)
        return None

    (text,), _ = run_on_ranks(2, program)
    assert "own reason" in text


def test_a_joint_call_tells_the_others_and_goes_on():
    def program(group):
        collectives = Collectives(group)
        with (
            pytest.raises((OSError, tf.errors.AbortedError)) as error,
            collectives.joint_call("save 'path'"),
            collectives.joint_call("inner"),
        ):
            if group.rank == 1:
                raise OSError("no space left")
            collectives.barrier("written")
        with collectives.joint_call("save again", end_barrier=True):
            collectives.barrier("written")
        return str(error.value)

    texts = run_on_ranks(3, program)
    assert texts[1] == "no space left"
    for text in (texts[0], texts[2]):
        assert "rank 1 (" in text
        assert "save 'path' failed: OSError: no space left" in text


def test_who_was_not_waiting_learns_it_at_the_next_thing():
    def program(group):
        collectives = Collectives(group)
        with pytest.raises((ValueError, tf.errors.AbortedError)) as error:
            if group.rank == 0:
                with collectives.joint_call("fit"):
                    raise ValueError("in the last callback")
            while not group.left()[0]:
                time.sleep(0.01)
            with collectives.joint_call("save"):
                raise AssertionError("was not told")
        # An exchange by itself, outside of `together`.
        (result,) = collectives.all_reduce([tf.ones([])], "sum")
        assert float(result) == 2
        return str(error.value)

    assert (
        "fit failed: ValueError: in the last callback"
        in (run_on_ranks(2, program)[1])
    )


def test_a_failed_exchange_by_itself_can_be_caught():
    def program(group):
        collectives = Collectives(group)
        splits = [1, 1] if group.rank else [1, 7]  # 7 rows that are not there
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError):
                collectives.all_to_all(
                    tf.zeros([2, 1]), tf.constant(splits, tf.int64), "bad"
                )
        (result,) = collectives.all_reduce([tf.ones([])], "sum")
        return float(result)

    assert run_on_ranks(2, program) == [2.0, 2.0]
