# SPDX-License-Identifier: Apache-2.0
"""The row updates: how to call each, and its float64 twin in NumPy."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist_ext.ops import optimizer_ops


def values(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def summed(rows, grads):
    """Unique rows and the float64 sums of their gradients."""
    unique, inverse = np.unique(np.asarray(rows, np.int64), return_inverse=True)
    sums = np.zeros((len(unique), grads.shape[1]))
    np.add.at(sums, inverse, grads.astype(np.float64))
    return unique, sums


def sgd(state, rows, g):
    state["table"][rows] -= 0.3 * g


def momentum(state, rows, g, nesterov=False):
    state["m"][rows] = 0.9 * state["m"][rows] - 0.3 * g
    ahead = 0.9 * state["m"][rows] - 0.3 * g
    state["table"][rows] += ahead if nesterov else state["m"][rows]


def nesterov_momentum(state, rows, g):
    momentum(state, rows, g, nesterov=True)


def adagrad(state, rows, g):
    state["a"][rows] += g * g
    state["table"][rows] -= 0.3 * g / np.sqrt(state["a"][rows] + 1e-7)


def row_wise_adagrad(state, rows, g):
    state["a"][rows] += (g * g).mean(axis=1)
    scale = 0.3 / np.sqrt(state["a"][rows] + 1e-7)
    state["table"][rows] -= scale[:, None] * g


def adam(state, rows, g, hat=False):
    step = state["step"]
    state["m"][rows] += (g - state["m"][rows]) * 0.1
    state["v"][rows] += (g * g - state["v"][rows]) * 0.001
    second = state["v"][rows]
    if hat:
        second = np.maximum(state["hat"][rows], second)
        state["hat"][rows] = second
    alpha = 0.3 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    state["table"][rows] -= alpha * state["m"][rows] / (np.sqrt(second) + 1e-7)


def amsgrad(state, rows, g):
    adam(state, rows, g, hat=True)


FTRL = {
    "ftrl": {},
    "ftrl l1 l2": {"l1": 0.5, "l2": 0.2, "l2_shrinkage": 0.1, "beta": 0.3},
    "ftrl power": {"learning_rate_power": -0.7, "l1": 0.1},
    "ftrl fixed rate": {"learning_rate_power": 0.0, "l2": 0.1},
}


def ftrl(options):
    power = -options.get("learning_rate_power", -0.5)
    l1, l2, shrinkage, beta = (
        options.get(name, 0.0) for name in ("l1", "l2", "l2_shrinkage", "beta")
    )

    def update(state, rows, g):
        w, n, z = state["table"][rows], state["a"][rows], state["z"][rows]
        after = n + g * g
        z += g + 2 * shrinkage * w - (after**power - n**power) / 0.3 * w
        state["a"][rows], state["z"][rows] = after, z
        quadratic = after**power / 0.3 + 2 * (l2 + beta / (2 * 0.3))
        state["table"][rows] = (np.clip(z, -l1, l1) - z) / quadratic

    return update


def adam_all_rows(state, rows, g):
    grads = np.zeros_like(state["table"])
    grads[rows] = g
    adam(state, np.arange(len(grads)), grads)


def runner(slots, make, **numbers):
    """A function that applies a rule to tables and slots by name.

    Args:
        slots: names of the slots.
        make: makes the rule.
        **numbers: its hyperparameters.
    """

    def run(ops, variables, rows, grads, step, **options):
        more = {"step": tf.constant(step, tf.int64)} if "m v" in slots else {}
        ops.update_rows(
            make(learning_rate=0.3, **numbers, **more),
            variables["table"],
            [variables[slot] for slot in slots.split()],
            rows,
            grads,
            **options,
        )

    return run


ADAM = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}
run_adagrad = runner("a", optimizer_ops.adagrad, epsilon=1e-7)
run_row_wise = runner("a", optimizer_ops.row_wise_adagrad, epsilon=1e-7)
run_adam = runner("m v", optimizer_ops.adam, **ADAM)

# name: (op, NumPy twin, slots)
RULES = {
    "sgd": (runner("", optimizer_ops.sgd), sgd, []),
    "momentum": (
        runner("m", optimizer_ops.momentum, momentum=0.9),
        momentum,
        ["m"],
    ),
    "nesterov": (
        runner("m", optimizer_ops.momentum, momentum=0.9, nesterov=True),
        nesterov_momentum,
        ["m"],
    ),
    "adagrad": (run_adagrad, adagrad, ["a"]),
    "row_wise": (run_row_wise, row_wise_adagrad, ["a"]),
    "adam": (run_adam, adam, ["m", "v"]),
    "adam, all rows": (
        runner("m v", optimizer_ops.adam, all_rows=True, **ADAM),
        adam_all_rows,
        ["m", "v"],
    ),
    "amsgrad": (
        runner("m v hat", optimizer_ops.adam, **ADAM),
        amsgrad,
        ["m", "v", "hat"],
    ),
    **{
        name: (
            runner("a z", optimizer_ops.ftrl, **options),
            ftrl(options),
            ["a", "z"],
        )
        for name, options in FTRL.items()
    },
}


def make_state(rng, rule, num_rows, dim):
    state = {"table": values(rng, num_rows, dim)}
    for slot in RULES[rule][2]:
        shape = (num_rows,) if rule == "row_wise" else (num_rows, dim)
        state[slot] = np.abs(values(rng, *shape)) + np.float32(0.1)
    return state
