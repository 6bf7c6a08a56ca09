# SPDX-License-Identifier: Apache-2.0
"""Requests that ranks serve at any time, with ranks as threads."""

import dataclasses
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.requests import Place
from tfdist_ext.comm.requests import Requests
from tfdist_ext.comm.requests import Updates
from tfdist_ext.ops import request_ops

PLACE = Place(100, "test/rows", tf.float32)


def doubled(peer, message, number):
    """Twice the numbers of a message, behind the rank that has sent them."""
    values = tf.bitcast(tf.reshape(message, [-1, 4]), tf.float32)
    shifted = 2 * values + tf.cast(number, tf.float32)
    return tf.concat([[tf.cast(peer, tf.float32)], shifted], 0)


def calling(function, result):
    """A handler that calls a function of Python, and returns `result`."""

    def handle(peer, message, number):
        called = tf.numpy_function(function, [], [], stateful=True)
        with tf.control_dependencies([called]):
            return tf.identity(result)

    return handle


def ask(group, requests, counts, number=0, place=PLACE):
    """Sends `counts[r]` numbers to each rank r."""
    numbers = tf.range(sum(counts), dtype=tf.float32)
    payload = tf.reshape(tf.bitcast(numbers, tf.uint8), [-1])
    splits = 4 * tf.constant(counts, tf.int64)
    return requests.request(
        place, payload, splits, tf.constant(number, tf.int64)
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_gets_the_replies_of_all(ranks):
    def run(group):
        requests = Requests(group, None)
        requests.serve(PLACE, doubled)
        found = []
        # Each rank sends another number of requests.
        for i in range(3 + 2 * group.rank):
            values, splits = ask(group, requests, list(range(ranks)), i)
            found.append((values.numpy(), splits.numpy(), i))
        meet(group)
        return found

    for rank, found in enumerate(run_on_ranks(ranks, run)):
        for values, splits, i in found:
            np.testing.assert_array_equal(splits, 1 + np.arange(ranks))
            numbers = iter(range(sum(range(ranks))))
            expected = []
            for owner in range(ranks):
                expected += [float(rank)]
                expected += [2.0 * next(numbers) + i for _ in range(owner)]
            np.testing.assert_array_equal(values, expected)


def meet(group):
    """Waits for all ranks: a rank must serve until the others are done."""
    from tfdist_ext.ops import collective_ops

    collective_ops.barrier(group, tag=2, label="end")


def test_a_rank_serves_while_it_does_something_else():
    """Rank 1 sends nothing, and runs no operation."""
    done = threading.Event()

    def run(group):
        requests = Requests(group, None)
        requests.serve(PLACE, doubled)
        if group.rank == 1:
            assert done.wait(20)
        else:
            for _ in range(20):
                ask(group, requests, [1, 1])
            time.sleep(1)
            ask(group, requests, [1, 1])
            done.set()
        # A server that has nothing to do does not wait for a rank.
        if group.rank == 1:
            assert sum(group.stats().waited) < 0.5
        meet(group)

    run_on_ranks(2, run)


def test_an_error_of_a_handler_reaches_the_rank_that_asks():
    def fail(peer, message, number):
        check = tf.debugging.Assert(number < 0, ["row 7 is missing"])
        with tf.control_dependencies([check]):
            return tf.zeros([0])

    def run(group):
        requests = Requests(group, None)
        requests.serve(PLACE, fail if group.rank == 1 else doubled)
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            ask(group, requests, [1, 1])
        assert "rank 1: " in str(error.value)
        assert "row 7 is missing" in str(error.value)
        meet(group)  # both ranks have asked the handler that fails
        requests.serve(PLACE, doubled)
        meet(group)
        ask(group, requests, [1, 1])  # the next request succeeds
        meet(group)

    run_on_ranks(2, run)


@pytest.mark.parametrize("bound", [1, 3, None])
def test_no_rank_is_further_ahead_than_the_bound(bound):
    """Rank 0 begins only when rank 1 is as far ahead as it may be."""
    steps, ranks = 8, 2
    lead = 5 if bound is None else bound + 1
    progress = [0] * ranks
    most = []

    def run(group):
        requests = Requests(group, bound)

        place = dataclasses.replace(PLACE, bounded=True)
        requests.serve(place, lambda peer, message, number: tf.zeros([0]))
        deadline = time.monotonic() + 20
        while group.rank == 0 and progress[1] < lead:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for step in range(steps):
            ask(group, requests, [0, 0], step, place)
            if group.rank == 1:
                most.append(progress[1] - progress[0])
            progress[group.rank] += 1
            requests.pushed.assign_add(1)
            requests.tick(tf.constant(4.0))
        meet(group)
        share = requests.share_of(tf.constant(4.0))
        assert requests.clock() == steps
        return float(share)

    assert run_on_ranks(ranks, run) == [0.5, 0.5]
    assert max(most[:lead]) == lead - 1
    assert bound is None or max(most) <= bound


class Owner:
    """Something that can be deleted."""


def test_handlers_are_deleted_with_their_owner():
    def run(group):
        requests = Requests(group, None)
        owner = Owner()
        requests.serve(PLACE, doubled)
        requests.forget_with(owner, [PLACE.tag])
        ask(group, requests, [1, 1])
        meet(group)
        del owner
        for _ in range(2):
            with pytest.raises(
                tf.errors.InvalidArgumentError, match="has been deleted"
            ):
                ask(group, requests, [1, 1])
        meet(group)
        requests.serve(PLACE, doubled)
        meet(group)
        ask(group, requests, [1, 1])
        meet(group)

    run_on_ranks(2, run)


def test_one_handler_runs_at_a_time():
    """The handlers of two kinds of requests, for the requests of all ranks."""
    places = [Place(100, "test/rows"), Place(102, "test/dense")]

    def run(group):
        requests = Requests(group, None)
        running, most = [], []

        def handle():
            running.append(None)
            most.append(len(running))
            time.sleep(0.005)
            running.pop()

        empty = tf.zeros([0], tf.uint8)
        for place in places:
            requests.serve(place, calling(handle, empty))
        threads = [
            threading.Thread(
                target=lambda place=place: [
                    ask(group, requests, [0] * 3, place=place) for _ in range(5)
                ]
            )
            for place in places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        meet(group)
        return most

    for most in run_on_ranks(3, run):
        assert most == [1] * 30


def test_closing_a_group_ends_what_it_serves():
    before = threading.active_count()

    def run(group):
        Requests(group, None).serve(PLACE, doubled)
        meet(group)

    started = time.monotonic()
    run_on_ranks(3, run)
    assert time.monotonic() - started < 10
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


def test_requests_work_after_a_joint_call_has_failed():
    """A rank leaves while the other one waits for its reply."""
    asked, failed = threading.Event(), threading.Event()

    def run(group):
        requests = Requests(group, None)

        def wait():
            # Rank 1 leaves once it serves the message. Earlier, the handler
            # that replaces this one could answer, and the request would wait
            # for the reply of rank 0 to itself.
            if group.rank == 1:
                asked.set()
            assert failed.wait(20)

        requests.serve(PLACE, calling(wait, tf.zeros([0])))
        group.will_leave(True)
        if group.rank == 1:
            assert asked.wait(20)
            group.leave("the program of rank 1 failed")
        else:
            with pytest.raises(tf.errors.AbortedError, match="of rank 1 fail"):
                ask(group, requests, [0, 0])
            failed.set()
            group.leave("it failed")
        group.will_leave(False)
        requests.serve(PLACE, doubled)
        values, _ = ask(group, requests, [1, 1])
        assert values.numpy()[0] == group.rank
        meet(group)

    run_on_ranks(2, run)


def test_updates_that_a_rank_does_not_know_are_counted():
    updates = Updates(2)
    ranks = tf.constant([0, 1], tf.int64)
    updates.add()
    updates.set_known(ranks[1])
    updates.add()
    updates.add()
    assert [int(updates.unknown_to(rank)) for rank in ranks] == [3, 2]


def test_malformed_requests_are_refused():
    def run(group):
        one = tf.constant(1, tf.int64)
        for payload, splits in (
            (tf.zeros([3], tf.uint8), [1, 1]),
            (tf.zeros([2], tf.uint8), [3, -1]),
            (tf.zeros([2], tf.uint8), [2]),
        ):
            with pytest.raises(tf.errors.InvalidArgumentError, match="splits"):
                request_ops.request(
                    *(group, payload, tf.constant(splits, tf.int64), one),
                    tag=5,
                    label="test",
                )
        with pytest.raises(tf.errors.InvalidArgumentError, match="peer"):
            request_ops.serve(
                *(group, tf.constant(2, tf.int64), one), tag=5, label="test"
            )
        meet(group)

    run_on_ranks(2, run)
