# SPDX-License-Identifier: Apache-2.0
"""A step that fails does not wait for its exchanges."""

import re
import threading
import time

import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops

# Of a barrier nothing is used: TensorFlow runs it before what comes next.
EXCHANGES = {
    "all_reduce": lambda group, x, tag: collective_ops.all_reduce(
        group, [x], tag=tag, label="waits"
    )[0],
    "all_gather": lambda group, x, tag: collective_ops.all_gather(
        group, x, tag=tag, label="waits"
    )[0],
    "all_to_all": lambda group, x, tag: collective_ops.all_to_all(
        group,
        x,
        tf.fill([2], tf.size(x, tf.int64) // 2),
        tag=tag,
        label="waits",
    )[0],
    "broadcast": lambda group, x, tag: collective_ops.broadcast(
        group, x, root=0, tag=tag, label="waits"
    ),
}


# A large sum has several phases: it needs both ranks until its end.
CASES = [
    (kind, size)
    for kind in EXCHANGES
    for size in (4, 1 << 20)
    if (kind, size) != ("all_reduce", 1 << 20)
]


def failing_step(exchange, group, x):
    def fail():
        time.sleep(0.5)  # the exchanges have begun
        raise ValueError("too many")

    @tf.function
    def step():
        exchange(group, x, 2)
        exchange(group, x, 2)  # waits for the first
        tf.py_function(fail, [], [])

    return step


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_an_exchange_ends_when_its_step_fails(kind, size, leaves):
    """Its peer gets what was sent, if the rank will leave, or the reason."""
    exchange = EXCHANGES[kind]
    failed = threading.Event()

    def program(group):
        x = tf.ones([size])
        if group.rank == 1:
            group.will_leave(leaves)
            start = time.monotonic()
            with pytest.raises(tf.errors.InvalidArgumentError, match="many"):
                failing_step(exchange, group, x)()
            failed.set()
            return time.monotonic() - start
        assert failed.wait(30)
        if leaves:
            exchange(group, x, 2)
            return 0
        with pytest.raises(tf.errors.UnavailableError) as error:
            exchange(group, x, 2)
        expected = r"rank 1 \([^)]*\) failed: another op .* 'waits' waited"
        assert re.search(expected, str(error.value)), str(error.value)
        return 0

    assert max(run_on_ranks(2, program, timeout=60)) < 15


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_ranks_whose_steps_fail_alike_stay_in_step(kind):
    """Each ends what it has begun, though nobody wants it any more."""
    exchange = EXCHANGES[kind]

    def program(group):
        results = []
        for _ in range(3):
            with pytest.raises(tf.errors.InvalidArgumentError, match="many"):
                failing_step(exchange, group, tf.ones([4]))()
            result = exchange(group, tf.fill([4], float(group.rank)), 2)
            results.append(float(tf.reduce_sum(result)))
        return results

    assert run_on_ranks(2, program) == [[4.0] * 3] * 2
