# SPDX-License-Identifier: Apache-2.0
"""Keys and values that all ranks see; the first value of a key stays."""

import threading
import time

import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_one_rank_inserts_comes_to_all(world_size):
    def use(group):
        group.insert_key(f"from {group.rank}", f"value {group.rank}")
        found = [group.await_key(f"from {r}", 20.0) for r in range(world_size)]
        group.check_same(["all have read"])  # before anybody leaves
        return found

    expected = [f"value {rank}" for rank in range(world_size)]
    assert run_on_ranks(world_size, use) == [expected] * world_size


def test_one_of_all_is_the_first():
    def use(group):
        try:
            group.insert_key("leader", f"{group.rank}")
            won = True
        except tf.errors.AlreadyExistsError:
            won = False
        leader = group.await_key("leader", 20.0)
        group.check_same(["all have read"])
        return won, int(leader)

    for _ in range(10):
        results = run_on_ranks(4, use)
        (winner,) = [rank for rank, (won, _) in enumerate(results) if won]
        assert [leader for _, leader in results] == [winner] * 4


def test_waiting_has_an_end():
    def use(group):
        began = time.monotonic()
        with pytest.raises(tf.errors.DeadlineExceededError, match="'nothing'"):
            group.await_key("nothing", 0.2)
        return time.monotonic() - began

    assert all(0.1 < waited < 10 for waited in run_on_ranks(2, use))


def test_closing_ends_waiting():
    def use(group):
        errors = []

        def wait():
            try:
                group.await_key("nothing")
            except tf.errors.OpError as error:
                errors.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        time.sleep(0.2)
        group.close()
        thread.join(20)
        return errors

    for errors in run_on_ranks(2, use):
        (error,) = errors
        assert isinstance(
            error, (tf.errors.CancelledError, tf.errors.UnavailableError)
        )


@pytest.mark.parametrize(
    ("key", "value"),
    [("", "a"), ("a\0b", "c"), ("a", "b\0"), ("a" * 500, "b" * 500)],
    ids=["empty", "zero-in-key", "zero-in-value", "long"],
)
def test_keys_that_cannot_travel_are_refused(key, value):
    def use(group):
        with pytest.raises(tf.errors.InvalidArgumentError, match="998 bytes"):
            group.insert_key(key, value)
        group.insert_key(f"{group.rank}" * 499, "b" * 499)  # the longest
        assert group.await_key("0" * 499, 20.0) == "b" * 499
        group.check_same(["all have read"])

    run_on_ranks(2, use)
