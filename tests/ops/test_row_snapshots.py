# SPDX-License-Identifier: Apache-2.0
"""Snapshots of variables that are updated while the snapshot is read."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import row_rules
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops.snapshot_ops import RowSnapshot

ROWS, WIDTH = 60, 5


def make_variables(rule, dtype=tf.float32):
    """A table and its slots by name, the same in every call."""
    state = row_rules.make_state(np.random.default_rng(0), rule, ROWS, WIDTH)
    names = ["table", *row_rules.RULES[rule][2]]
    return {
        name: tf.Variable(
            state[name], dtype=dtype if name == "table" else tf.float32
        )
        for name in names
    }


def numbers(variables):
    return {
        name: tf.cast(v, tf.float32).numpy().copy()
        for name, v in variables.items()
    }


def step(rule, variables, number, repeated=False):
    """One update of about a third of the rows."""
    rng = np.random.default_rng(number)
    rows = rng.choice(ROWS, 20, replace=repeated)
    grads = tf.constant(row_rules.values(rng, 20, WIDTH))
    run = row_rules.RULES[rule][0]
    run(optimizer_ops, variables, tf.constant(rows), grads, number)


def address(variable):
    """The address of a variable's buffer; nothing refers to it afterwards."""
    return np.frombuffer(memoryview(variable.read_value())).ctypes.data


def taken(snapshot, rows=None):
    rows = range(ROWS) if rows is None else rows
    found = snapshot.take(tf.constant(list(rows), tf.int64))
    return tf.cast(found, tf.float32).numpy()


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16], ids=str)
@pytest.mark.parametrize("rule", row_rules.RULES)
def test_holds_the_rows_of_its_time(rule, dtype):
    variables, alone = make_variables(rule, dtype), make_variables(rule, dtype)
    step(rule, variables, 1)
    step(rule, alone, 1)
    before = numbers(variables)
    snapshots = {name: RowSnapshot(v) for name, v in variables.items()}
    order = np.random.default_rng(3).permutation(ROWS)
    for number in (2, 3, 4):
        some = order[number - 2 :: 3]
        for name, snapshot in snapshots.items():
            found = taken(snapshot, some)
            np.testing.assert_array_equal(found, before[name][some])
        step(rule, variables, number, repeated=number == 3)
        step(rule, alone, number, repeated=number == 3)
    # The updates are those of variables without snapshots.
    for name, expected in numbers(alone).items():
        np.testing.assert_array_equal(numbers(variables)[name], expected)


def test_holds_the_rows_while_a_lookup_and_its_update_are_one_op():
    table = tf.Variable(np.arange(ROWS * 2.0).reshape(ROWS, 2), dtype="float32")
    before, snapshot = table.numpy().copy(), RowSnapshot(table)
    optimizer_ops.update_looked_up_rows(
        optimizer_ops.sgd(learning_rate=1.0),
        [table],
        [[]],
        tf.constant([0, 2, 3], tf.int64),
        tf.constant([4, 9, 9], tf.int64),
        tf.zeros([0]),
        tf.constant([[2]], tf.int64),
        tf.ones([4]),
        feature_tables=[0],
    )
    changed = np.flatnonzero((table.numpy() != before).any(axis=1))
    np.testing.assert_array_equal(changed, [4, 9])
    np.testing.assert_array_equal(taken(snapshot), before)


def test_our_updates_do_not_copy_the_buffer():
    variables = make_variables("adam")
    step("adam", variables, 1)  # copies values that the test still refers to
    snapshots = [RowSnapshot(v) for v in variables.values()]
    at = {name: address(v) for name, v in variables.items()}
    for number in (2, 3):
        step("adam", variables, number)
    rows = tf.constant([7], tf.int64)
    optimizer_ops.clip_rows(variables["table"], rows, max_norm=0.1)
    assert at == {name: address(v) for name, v in variables.items()}
    del snapshots
    step("adam", variables, 4)
    assert at == {name: address(v) for name, v in variables.items()}


def scatter(table):
    table.scatter_update(tf.IndexedSlices(tf.zeros([1, WIDTH]), [3]))


def dense_update(table):
    tf.raw_ops.ResourceApplyGradientDescent(
        var=table.handle, alpha=1.0, delta=tf.ones([ROWS, WIDTH])
    )


def sparse_update(table):
    tf.raw_ops.ResourceScatterAdd(
        resource=table.handle, indices=[3], updates=tf.ones([1, WIDTH])
    )


OTHER_WRITES = {
    "assign": lambda table: table.assign(tf.zeros([ROWS, WIDTH])),
    "assign_add": lambda table: table.assign_add(tf.ones([ROWS, WIDTH])),
    "scatter_update": scatter,
    "scatter_add": sparse_update,
    "dense update": dense_update,
    "scale_table": lambda table: optimizer_ops.scale_table(table, 0.5),
}


@pytest.mark.parametrize("write", OTHER_WRITES)
@pytest.mark.parametrize("mode", ["new", "written sparsely before"])
def test_other_ops_do_not_change_it(write, mode):
    table = make_variables("sgd")["table"]
    if mode != "new":
        scatter(table)  # after which TensorFlow does not look for readers
    before, snapshot = table.numpy().copy(), RowSnapshot(table)
    step("sgd", {"table": table}, 1)
    OTHER_WRITES[write](table)
    assert (table.numpy() != before).any()
    step("sgd", {"table": table}, 2)
    OTHER_WRITES[write](table)
    np.testing.assert_array_equal(taken(snapshot), before)


def test_another_reader_keeps_its_values():
    table = make_variables("sgd")["table"]
    before, snapshot = table.numpy().copy(), RowSnapshot(table)
    read = table.read_value()
    step("sgd", {"table": table}, 1)
    np.testing.assert_array_equal(read, before)
    after = table.numpy().copy()
    later = RowSnapshot(table)
    step("sgd", {"table": table}, 2)
    np.testing.assert_array_equal(taken(snapshot), before)
    np.testing.assert_array_equal(taken(later), after)


def test_several_snapshots_of_a_variable():
    table, found = make_variables("sgd")["table"], []
    for number in range(3):
        found.append((table.numpy().copy(), RowSnapshot(table)))
        step("sgd", {"table": table}, number)
    for before, snapshot in found:
        np.testing.assert_array_equal(taken(snapshot), before)


def test_a_row_can_be_taken_once():
    snapshot = RowSnapshot(make_variables("sgd")["table"])
    taken(snapshot, [3, 4])
    with pytest.raises(tf.errors.FailedPreconditionError, match="row 4 has al"):
        taken(snapshot, [5, 4])
    for row in (-1, ROWS):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"row {row} "):
            taken(snapshot, [row])


def test_needs_a_variable_with_rows():
    with pytest.raises(tf.errors.InvalidArgumentError, match="one dimension"):
        RowSnapshot(tf.Variable(1.0))


def test_lookups_read_the_new_rows():
    table = make_variables("sgd")["table"]
    snapshot = RowSnapshot(table)
    step("sgd", {"table": table}, 1)
    values, _ = lookup_ops.lookup(
        [table],
        tf.constant([0, 1], tf.int64),
        tf.constant([7], tf.int64),
        tf.zeros([0]),
        tf.constant([[1]], tf.int64),
        feature_tables=[0],
    )
    np.testing.assert_array_equal(values, table.numpy()[7])
    del snapshot


def test_threads_read_while_others_update():
    rows = 20_000
    table = tf.Variable(tf.random.stateless_normal([rows, 16], [1, 2]))
    before = table.numpy().copy()
    done, snapshot = threading.Event(), RowSnapshot(table)

    def update():
        rng = np.random.default_rng(0)
        while not done.is_set():
            optimizer_ops.update_rows(
                optimizer_ops.sgd(learning_rate=1.0),
                table,
                [],
                tf.constant(rng.integers(0, rows, 500)),
                tf.ones([500, 16]),
            )

    thread = threading.Thread(target=update)
    thread.start()
    try:
        found = [
            taken(snapshot, range(first, first + 100))
            for first in range(0, rows, 100)
        ]
    finally:
        done.set()
        thread.join()
    np.testing.assert_array_equal(np.concatenate(found), before)
    assert (table.numpy() != before).any()
