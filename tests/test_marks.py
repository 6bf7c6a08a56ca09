# SPDX-License-Identifier: Apache-2.0
"""What is said of variables is found, and costs a graph nothing."""

import tensorflow as tf

from tfdist_ext import marks


def test_a_mirrored_variable_is_not_read_for_its_marks():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        variable = tf.Variable([1.0])
        other = tf.Variable([2.0])
    keys, rule = object(), object()
    marks.set_keys(variable, keys)
    marks.set_own_optimizer(variable, rule)

    @tf.function
    def ask():
        found = []
        with strategy.scope():  # where a variable's value is that of all
            for each in (variable, *variable.values, other):
                found += [marks.keys_of(each), marks.own_optimizer(each)]
                found += [marks.max_norm(each), marks.is_fixed(each)]
        assert found == [
            *(keys, rule, None, False),
            *(None, rule, None, False),
            *(None, None, None, False),
        ]

    graph = ask.get_concrete_function().graph
    assert {op.type for op in graph.get_operations()} <= {"NoOp"}
