# SPDX-License-Identifier: Apache-2.0
"""A step that fails does not wait for its exchanges."""

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


@pytest.mark.parametrize(("kind", "size"), CASES)
def test_an_exchange_ends_when_its_step_fails(kind, size):
    """Its peer does not learn of it, and gets what the rank has sent."""
    exchange = EXCHANGES[kind]
    failed = threading.Event()

    def program(group):
        x = tf.ones([size])

        def fail():
            time.sleep(0.5)  # the exchanges have begun
            raise ValueError("too many")

        @tf.function
        def step():
            exchange(group, x, 2)
            exchange(group, x, 2)  # waits for the first
            tf.py_function(fail, [], [])

        if group.rank == 1:
            start = time.monotonic()
            with pytest.raises(tf.errors.InvalidArgumentError, match="many"):
                step()
            failed.set()
            return time.monotonic() - start
        assert failed.wait(30)
        exchange(group, x, 2)
        return 0

    assert max(run_on_ranks(2, program, timeout=60)) < 15
