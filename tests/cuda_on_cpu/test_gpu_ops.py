# SPDX-License-Identifier: Apache-2.0
"""The ops' kernels for GPUs under emulation, against those for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfdist_ext
from tests.cuda_on_cpu import sent_parts
from tests.cuda_on_cpu.emulated_ops import EmulatedOps
from tests.cuda_on_cpu.emulated_ops import on_cpu
from tests.ops import row_rules
from tests.ops.csr_batches import csr_batch
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops
from tfdist_ext.ops import optimizer_ops

ROWS = 50
# Tables of every kind at once; the last feature has no samples here.
WIDTHS, FEATURE_TABLES = (58, 3, 16, 1), (0, 1, 2, 0, 3, -1)


def same(gpu: EmulatedOps, function: Callable[[], Any]) -> list[np.ndarray]:
    """Runs a function on both; its results are the same but for rounding."""
    expected = tf.nest.flatten(on_cpu(function))
    before = gpu.launches()
    found = tf.nest.flatten(gpu.run(function))
    assert gpu.launches() > before
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-5)
    return [each.numpy() for each in found]


def batch(weighted: bool, most: int, seed: int = 0) -> list[Any]:
    """What two ranks ask of the tables."""
    rng = np.random.default_rng(seed)
    served = rng.integers(0, 9, [2, len(FEATURE_TABLES)])
    served[:, -1] = 0
    rows, splits, weights = csr_batch(rng, served.sum(), most, ROWS, weighted)
    if most == 1:
        rows = rng.integers(0, ROWS, served.sum())
        splits, weights = np.arange(served.sum() + 1), np.zeros(0, np.float32)
    return [*map(tf.constant, (splits, rows, weights, served))]


def tables() -> list[tf.Variable]:
    rng = np.random.default_rng(1)
    return [
        tf.Variable(rng.normal(size=[ROWS, width]), dtype=dtype)
        for width, dtype in zip(
            WIDTHS,
            [tf.float32, tf.float32, tf.bfloat16, tf.float32],
            strict=True,
        )
    ]


@pytest.mark.parametrize(
    "weighted, most", [(False, 6), (True, 200), (False, 1), (False, 0)]
)
def test_lookup_and_its_gradient(
    gpu: EmulatedOps, weighted: bool, most: int
) -> None:
    variables, inputs = tables(), batch(weighted, most)
    grad = tf.random.stateless_normal([10_000], [1, 2])

    def look_up() -> Any:
        values, sent = lookup_ops.lookup(
            variables, *inputs, feature_tables=FEATURE_TABLES
        )
        grads = lookup_ops.lookup_grad(
            *inputs,
            grad[: tf.size(values)],
            feature_tables=FEATURE_TABLES,
            table_shapes=[(ROWS, width) for width in WIDTHS],
        )
        return values, sent, grads

    before = gpu.waits()
    same(gpu, look_up)
    assert gpu.waits() == before + 1


def updated(
    run: Callable[[Callable[[], Any]], Any],
    rule: str,
    rows: Sequence[int],
    dim: int,
    dtype: tf.DType,
) -> dict[str, np.ndarray]:
    """A table of that dtype and its slots, after an update."""
    rng = np.random.default_rng(dim)
    state = row_rules.make_state(rng, rule, 40, dim)
    grads = row_rules.values(rng, len(rows), dim)
    variables = {name: tf.Variable(value) for name, value in state.items()}
    variables["table"] = tf.Variable(state["table"], dtype=dtype)
    seed = 7 if dtype == tf.bfloat16 else None
    given = np.asarray(rows, np.int64), grads, 1
    run(
        lambda: row_rules.RULES[rule][0](
            optimizer_ops, variables, *given, rounding_seed=seed
        )
    )
    return {
        name: tf.cast(variable, tf.float32).numpy()
        for name, variable in variables.items()
    }


@pytest.mark.parametrize("rule", row_rules.RULES)
def test_updates(gpu: EmulatedOps, rule: str) -> None:
    """Rows in order, none, and such that repeat; a width of quads or not."""
    for rows, dim, dtype in (
        ([0, 2, 17, 39], 16, tf.float32),
        ([5, 5, 39, 1, 0, 5], 7, tf.float32),
        ([], 8, tf.float32),
        ([3, 1, 3], 12, tf.bfloat16),
    ):
        expected = updated(on_cpu, rule, rows, dim, dtype)
        for name, ours in updated(gpu.run, rule, rows, dim, dtype).items():
            np.testing.assert_allclose(
                ours,
                expected[name],
                rtol=2**-7 if dtype == tf.bfloat16 else 1e-5,
                atol=1e-6,
                err_msg=f"{name} {rows}",
            )


def test_what_is_read_before_an_update_stays(gpu: EmulatedOps) -> None:
    table = tf.Variable(tf.ones([3, 4]))

    def update() -> tuple[tf.Tensor, tf.Tensor]:
        before = table.read_value()
        optimizer_ops.update_rows(
            optimizer_ops.sgd(learning_rate=0.5),
            table,
            [],
            [1],
            tf.ones([1, 4]),
        )
        return before, table.read_value()

    before, after = gpu.run(update)
    np.testing.assert_array_equal(before, np.ones([3, 4]))
    np.testing.assert_array_equal(after[:, 0], [1, 0.5, 1])


def test_all_else_of_a_step(gpu: EmulatedOps) -> None:
    rng = np.random.default_rng(3)
    grads = row_rules.values(rng, 6, 5)
    for rows in ([9, 2, 9, 2, 2, 40], [0, 1, 2, 3, 4, 9]):
        repeated = tf.constant(rows, tf.int64)

        def others(repeated: tf.Tensor = repeated) -> Any:
            block = lookup_ops.init_rows(
                rows=29,
                row_part=2,
                row_parts=3,
                local_rows=10,
                first_column=3,
                local_dim=7,
                seed=11,
                distribution="truncated_normal",
                b=0.1,
            )
            wire = id_ops.to_wire(
                block, tf.bfloat16, rounding="stochastic", seed=5
            )
            return (
                block,
                tf.cast(wire, tf.float32),
                optimizer_ops.sum_duplicate_rows(repeated, grads),
            )

        same(gpu, others)
    for dtype in (tf.float32, tf.bfloat16):
        value = tf.constant(row_rules.values(rng, 8, 6))
        table = tf.Variable(tf.zeros([8, 6], dtype))

        def change(table: tf.Variable = table, value: Any = value) -> Any:
            table.assign(tf.cast(value, table.dtype))
            optimizer_ops.clip_rows(table, [5, 0, 7], max_norm=1.0)
            optimizer_ops.clip_rows(
                table, [1, 2], max_norm=1.0, squares=tf.constant([0.1, 9.0])
            )
            optimizer_ops.scale_table(table, 0.9)
            return tf.cast(table, tf.float32)

        same(gpu, change)


@pytest.mark.parametrize("weighted", [False, True])
def test_unique_rows_are_pooled(gpu: EmulatedOps, weighted: bool) -> None:
    """Rows that nobody asks for, samples without any; no sample, no row."""
    rng = np.random.default_rng(5)
    for samples, rows, width in ((40, 30, 7), (9, 1, 64), (0, 3, 4), (2, 0, 4)):
        positions, splits, weights = csr_batch(
            rng, samples, 5 if rows else 0, max(rows, 1), weighted
        )
        matrix = tf.constant(row_rules.values(rng, rows, width))
        grad = tf.constant(row_rules.values(rng, samples, width))

        def pool(
            matrix: tf.Tensor = matrix,
            grad: tf.Tensor = grad,
            entries: Any = (splits, positions, weights),
        ) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(matrix)
                pooled = lookup_ops.pool(matrix, *entries)
            return pooled, tape.gradient(pooled, matrix, grad)

        if samples and rows:
            same(gpu, pool)
        else:
            for ours, theirs in zip(gpu.run(pool), on_cpu(pool), strict=True):
                np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("scale", [0.5, 0.0])
def test_parts_are_joined(gpu: EmulatedOps, scale: float) -> None:
    """Samples of several ranks, of one and of none."""
    parts, sample_ids, splits, grads = sent_parts.sent(
        np.inf if scale == 0 else 1.0
    )

    def join() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(parts)
            joined = lookup_ops.join_parts(
                *(
                    parts,
                    sample_ids,
                    splits,
                    np.array(sent_parts.SAMPLES),
                    scale,
                ),
                placements=sent_parts.PLACEMENTS,
                world_size=3,
            )
        return joined, tape.gradient(joined, parts, grads)

    *_, gradient = same(gpu, join)
    assert gradient.any() == (scale > 0)


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("distribution", ["normal", "constant"])
def test_rows_get_their_first_values_again(
    gpu: EmulatedOps, dtype: tf.DType, distribution: str
) -> None:
    """Those of this cell; one twice; none."""
    table = tf.Variable(tf.zeros([10, 7], dtype))

    def reset() -> tf.Tensor:
        table.assign(tf.ones([10, 7], dtype))
        for ids in ([*range(0, 29, 2), 4, 500], [], [-1]):
            lookup_ops.reset_rows(
                table,
                tf.constant(ids, tf.int64),
                rows=29,
                row_part=2,
                row_parts=3,
                local_rows=10,
                first_column=3,
                local_dim=7,
                seed=11,
                distribution=distribution,
                a=0.25,
                b=0.1,
            )
        return tf.cast(table, tf.float32)

    (found,) = same(gpu, reset)
    changed = np.any(found != 1, axis=1)
    assert changed.any() and not changed.all()


NONE = np.zeros(0, np.float32)


def look_up(table: tf.Variable, row: int) -> Any:
    return lookup_ops.lookup(
        [table], [0, 1], [row], NONE, [[1]], feature_tables=[0]
    )


def gradient(row: int, size: int = 2) -> Any:
    return lookup_ops.lookup_grad(
        *([0, 1], [row], NONE, [[1]], tf.zeros([size])),
        feature_tables=[0],
        table_shapes=[(4, 2)],
    )


@pytest.mark.parametrize("row", [4, -1])
def test_rows_that_nobody_has_refused_are_left_out(
    gpu: EmulatedOps, row: int
) -> None:
    """On a CPU they are errors; nothing waits on a GPU to say so."""
    table = tf.Variable(tf.ones([4, 2]))
    for wrong in (lambda: look_up(table, row), lambda: gradient(row)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"Row {row}"):
            on_cpu(wrong)
    values, _ = gpu.run(lambda: look_up(table, row))
    np.testing.assert_array_equal(values, [0, 0])
    (unique,), _ = gpu.run(lambda: gradient(row))
    assert unique.shape == (0,)


def update(table: tf.Variable, rows: Sequence[int], shape: Any) -> Any:
    return optimizer_ops.update_rows(
        optimizer_ops.sgd(learning_rate=0.1), table, [], rows, tf.zeros(shape)
    )


@pytest.mark.parametrize(
    "wrong, found",
    [
        (lambda table: gradient(0, size=3), "grad must have the 2 elements"),
        (lambda table: update(table, [1, 4], [2, 2]), "row 4 at position 1"),
        (lambda table: update(table, [-1], [1, 2]), "row -1 at position 0"),
        (lambda table: update(table, [1], [1, 3]), "must fit the table"),
        (
            lambda table: optimizer_ops.clip_rows(table, [1, 1], max_norm=1.0),
            "must each be given once",
        ),
    ],
)
def test_errors_are_those_of_the_cpu(
    gpu: EmulatedOps, wrong: Callable[[Any], Any], found: str
) -> None:
    table, before = tf.Variable(tf.zeros([4, 2])), gpu.launches()

    def fail() -> Any:
        result = wrong(table)
        return None if isinstance(result, tf.Operation) else result

    for run in (on_cpu, gpu.run):
        with pytest.raises(tf.errors.InvalidArgumentError, match=found):
            run(fail)
    assert gpu.launches() == before


def trained(run: Callable[[Callable[[], Any]], Any]) -> list[np.ndarray]:
    """The weights of two tables after three steps."""
    random = np.random.default_rng(0)
    ids = tf.constant(random.integers(0, 30, [3, 8, 2, 3]))
    features = {}
    for index, (dim, longest) in enumerate([(8, 0.1), (3, None)]):
        table = tfdist_ext.TableConfig(
            f"table_{index}",
            30,
            dim,
            initializer=tf.keras.initializers.RandomUniform(seed=1),
            max_norm=longest,
        )
        features[index] = tfdist_ext.FeatureConfig(
            f"feature_{index}", table, (8, 3), (8, dim)
        )
    layer = tfdist_ext.layers.DistributedEmbedding(list(features.values()))
    optimizer = tfdist_ext.optimizers.Adagrad(0.1)
    layer([ids[0, :, 0], ids[0, :, 1]])
    variables = layer.trainable_variables
    optimizer.build(variables)

    def step(batch: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            results = layer([batch[:, 0], batch[:, 1]])
            loss = sum(tf.reduce_mean(tf.square(x)) for x in results)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for batch in ids:
        run(lambda batch=batch: step(batch))
    return [variable.numpy() for variable in variables]


def test_a_model_trains_alike(gpu: EmulatedOps) -> None:
    """With all ops of a step; in each the host waits once."""
    expected = trained(on_cpu)
    waits = gpu.waits()
    for ours, theirs in zip(trained(gpu.run), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert gpu.waits() == waits + 3
