# SPDX-License-Identifier: Apache-2.0
"""Numbers of exchanges: different ones, and the same on all ranks."""

import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.calls import CallLock
from tfdist_ext.comm.calls import Step
from tfdist_ext.comm.calls import Tags
from tfdist_ext.comm.collectives import Collectives


def test_no_two_exchanges_share_a_tag():
    tags = Tags(CallLock())
    step = Step(tf.constant(1.0), weighted=False, role="train")
    labels = [f"layer_{layer}/ids" for layer in range(50_000)]
    found = {tags.take(step, label, "sum", tf.float32) for label in 4 * labels}
    assert len(found) == 4 * len(labels)
    assert all(tag % 2 == 0 and 0 <= tag < 1 << 62 for tag in found)


def test_steps_of_other_names_are_found_when_they_are_traced():
    """Their tags differ, so they would wait for each other."""

    def program(group):
        collectives = Collectives(group)

        @tf.function
        def traced():
            step = Step(
                tf.constant(1.0), weighted=False, role=f"train_{group.rank}"
            )
            with collectives.stepping(step):
                return collectives.all_reduce([tf.ones([2])], "dense")[0]

        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            traced()
        return str(error.value)

    for message in run_on_ranks(2, program):
        assert "'step train_0'" in message
        assert "'step train_1'" in message


def test_what_is_staged_for_a_layer_is_found_by_its_strategy_only():
    """The staged ids of a closed strategy outlive it in the process."""

    class Layer:
        name = "embedding"

    def program(group):
        layer = Layer()
        places = [Collectives(group).place_of(layer) for _ in range(2)]
        collectives = Collectives(group)
        again = [collectives.place_of(layer) for _ in range(2)]
        return [*places, again[0]], again

    for (first, second, third), again in run_on_ranks(2, program):
        assert len({first, second, third}) == 3
        assert again == [third, third]
