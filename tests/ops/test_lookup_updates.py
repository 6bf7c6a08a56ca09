# SPDX-License-Identifier: Apache-2.0
"""Ops that compute the gradient of a lookup and update its rows."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests.ops import row_rules
from tests.ops.csr_batches import csr_batch
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops.library import library

ROWS = 60
# Per case: widths of the tables, table of each feature, ranks, samples.
CASES = {
    "one table": ([16], [0], 1, 40),
    "narrow and wide": ([3, 64, 300], [0, 1, 2], 1, 25),
    "a shared table": ([7, 58], [1, 0, 1, -1], 3, 9),
    "nothing to update": ([8, 8], [0, 1], 2, 0),
    "wider than the buffer": ([2100], [0], 1, 5),
}
RULES = sorted(set(row_rules.RULES) - {"adam, all rows"})


class _Operators:
    """The ops module of a rule's runner; notes the rule and its options."""

    def update_rows(self, rule, table, slots, rows, grads, **options):
        self.rule = rule


def rule_of(name):
    noted = _Operators()
    slots = dict.fromkeys(["table", *row_rules.RULES[name][2]])
    row_rules.RULES[name][0](noted, slots, None, None, 3)
    return noted.rule


def make_tables(rule, widths, dtype):
    """Tables and their slots, the same in every call."""
    tables, slots = [], []
    for i, width in enumerate(widths):
        state = row_rules.make_state(
            np.random.default_rng(i), rule, ROWS, width
        )
        tables.append(tf.Variable(state["table"], dtype=dtype))
        slots.append([tf.Variable(state[s]) for s in row_rules.RULES[rule][2]])
    return tables, slots


def make_batch(widths, feature_tables, ranks, samples, weighted):
    rng = np.random.default_rng(ranks)
    served = rng.integers(0, samples + 1, [ranks, len(feature_tables)])
    served[:, np.array(feature_tables) < 0] = 0
    rows, splits, weights = csr_batch(rng, served.sum(), 6, ROWS, weighted)
    of_feature = [widths[t] if t >= 0 else 0 for t in feature_tables]
    grad = row_rules.values(rng, int((served * of_feature).sum()))
    return tuple(map(tf.constant, (splits, rows, weights, served, grad)))


def both_ways(rule, case, dtype, weighted, seeded):
    """Tables and slots after one op, and after a gradient and updates."""
    widths, feature_tables, ranks, samples = CASES[case]
    batch = make_batch(widths, feature_tables, ranks, samples, weighted)
    seeds = list(range(len(widths))) if seeded else []
    results = []
    for one_op in (True, False):
        tables, slots = make_tables(rule, widths, dtype)
        if one_op:
            optimizer_ops.update_looked_up_rows(
                rule_of(rule),
                tables,
                slots,
                *batch,
                feature_tables=feature_tables,
                rounding_seeds=seeds,
            )
        else:
            found = lookup_ops.lookup_grad(
                *batch,
                feature_tables=feature_tables,
                table_shapes=[table.shape for table in tables],
            )
            for i, (rows, grads) in enumerate(zip(*found, strict=True)):
                optimizer_ops.update_rows(
                    rule_of(rule),
                    tables[i],
                    slots[i],
                    rows,
                    grads,
                    rounding_seed=seeds[i] if seeded else None,
                )
        variables = [*tables, *(slot for each in slots for slot in each)]
        results.append([tf.cast(v, tf.float32).numpy() for v in variables])
    return results


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rule", RULES)
def test_one_op_gives_the_same_bits(rule, case):
    for dtype, weighted, seeded in [
        (tf.float32, False, False),
        (tf.float32, True, False),
        (tf.bfloat16, True, False),
        (tf.bfloat16, False, True),
    ]:
        ours, separate = both_ways(rule, case, dtype, weighted, seeded)
        for mine, other in zip(ours, separate, strict=True):
            np.testing.assert_array_equal(mine, other)


def test_the_rows_of_a_lookup_change():
    ours, _ = both_ways("sgd", "one table", tf.float32, False, False)
    before, _ = make_tables("sgd", [16], tf.float32)
    changed = (ours[0] != before[0].numpy()).all(axis=1)
    assert 10 < changed.sum() <= ROWS


def test_many_entries_in_parallel():
    """Tables are divided into ranges of rows that threads sort and update."""
    rng = np.random.default_rng(0)
    count, width = 200_000, 8
    rows = tf.constant(rng.integers(0, 50_000, count))
    splits = tf.range(count + 1, dtype=tf.int64)
    grad = tf.constant(row_rules.values(rng, count * width))
    batch = splits, rows, tf.zeros([0]), tf.constant([[count]], tf.int64), grad
    rule = optimizer_ops.adagrad(learning_rate=0.1, epsilon=1e-7)
    table, slot = (
        tf.Variable(tf.zeros([50_000, width])),
        tf.Variable(tf.ones([50_000, width])),
    )
    optimizer_ops.update_looked_up_rows(
        rule, [table], [[slot]], *batch, feature_tables=[0]
    )
    sums = np.zeros((50_000, width))
    np.add.at(sums, rows.numpy(), grad.numpy().reshape(-1, width))
    np.testing.assert_allclose(slot, 1 + sums**2, rtol=1e-3, atol=1e-3)
    expected = -0.1 * sums / np.sqrt(1 + sums**2 + 1e-7)
    np.testing.assert_allclose(table, expected, rtol=1e-3, atol=1e-4)


def change(batch, **parts):
    names = ("row_splits", "rows", "weights", "served", "grad")
    return [parts.get(n, b) for n, b in zip(names, batch, strict=True)]


@pytest.mark.parametrize(
    "what, found",
    [
        ("row above", "Row 60 is out of range: table 1 has 60 rows"),
        ("row below", "Row -1 is out of range"),
        ("short gradient", "grad must have the"),
        ("slot", "slot .* must have shape"),
        ("table twice", "different variables"),
        ("seeds", "one scalar per table"),
        ("seed of a shape", "must be scalars"),
    ],
)
def test_nothing_is_written_if_an_input_is_bad(what, found):
    batch = make_batch([4, 4], [0, 1], 1, 9, False)
    tables, slots = make_tables("adagrad", [4, 4], tf.float32)
    seeds = []
    if what.startswith("row"):
        rows = batch[1].numpy()
        rows[-1] = ROWS if what == "row above" else -1
        batch = change(batch, rows=rows)
    elif what == "short gradient":
        batch = change(batch, grad=batch[4][1:])
    elif what == "slot":
        slots[1] = [tf.Variable(tf.zeros([ROWS, 3]))]
    elif what == "table twice":
        tables[1] = tables[0]
    else:
        seeds = [1] if what == "seeds" else [1, [2, 3]]
    before = [v.numpy() for v in (*tables, *slots[0], *slots[1])]
    rule = optimizer_ops.adagrad(learning_rate=0.1, epsilon=1e-7)
    with pytest.raises(tf.errors.InvalidArgumentError, match=found):
        optimizer_ops.update_looked_up_rows(
            rule,
            tables,
            slots,
            *batch,
            feature_tables=[0, 1],
            rounding_seeds=seeds,
        )
    after = [v.numpy() for v in (*tables, *slots[0], *slots[1])]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


def test_slots_that_only_some_tables_have():
    batch = make_batch([4, 4], [0, 1], 1, 9, False)
    tables, slots = make_tables("amsgrad", [4, 4], tf.float32)
    handles = [
        [slot.handle for slot in each] for each in zip(*slots, strict=True)
    ]
    with pytest.raises(tf.errors.InvalidArgumentError, match="one per table"):
        library().tfdist_apply_lookup_grad_adam(
            *batch,
            [table.handle for table in tables],
            *handles[:2],
            handles[2][:1],
            *rule_of("amsgrad").numbers,
            [],
            feature_tables=[0, 1],
        )
