# SPDX-License-Identifier: Apache-2.0
"""The oracle: the same training in one process, from stock ops only.

Only the rows that the batches touch exist here, so the oracle of a table of a
gigabyte needs no gigabyte: `compact` renumbers the ids.
"""

import dataclasses

import numpy as np
import tensorflow as tf

from benchmarks import workloads

# Keras's defaults for Adagrad.
_INITIAL_ACCUMULATOR = 0.1
_EPSILON = 1e-7


@dataclasses.dataclass(frozen=True)
class Compact:
    """Global batches whose ids count the touched rows only.

    Attributes:
        touched: per table the ascending ids that occur, int64 `[u]`.
        steps: per step and rank a batch whose ids index `touched`.
    """

    touched: tuple[np.ndarray, ...]
    steps: tuple[tuple[workloads.Batch, ...], ...]


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the oracle arrives at.

    Attributes:
        losses: per step and rank the summed loss over the rank's samples,
            divided by the size of the global batch.
        rows: per table the touched rows, float32 `[u, width]`.
        dense: kernels and biases of the tower, in order.
        kink: how close a hidden unit came to the kink of its ReLU: the
            smallest magnitude of an input of a ReLU, relative to the largest.
    """

    losses: np.ndarray
    rows: tuple[np.ndarray, ...]
    dense: tuple[np.ndarray, ...]
    kink: float


def compact(
    steps: tuple[tuple[workloads.Batch, ...], ...], tables: int
) -> Compact:
    """Renumbers the ids of `steps` (per step one batch per rank)."""
    touched = tuple(
        np.unique([batch.ids[table] for step in steps for batch in step])
        for table in range(tables)
    )
    renumbered = tuple(
        tuple(
            workloads.Batch(
                tuple(
                    np.searchsorted(rows, ids)
                    for rows, ids in zip(touched, batch.ids, strict=True)
                ),
                batch.labels,
            )
            for batch in step
        )
        for step in steps
    )
    return Compact(touched, renumbered)


def logits(
    head: workloads.Head,
    pooled: list[tf.Tensor],
    dense: list[tf.Tensor | tf.Variable],
    hidden: list[tf.Tensor] | None = None,
) -> tf.Tensor:
    """A workload's head in stock ops: float32 `[batch_size, 1]`.

    Args:
        head: what to do with the results of the tables.
        pooled: float32 `[batch_size, width]` per table.
        dense: kernels and biases of the towers in order, or one bias.
        hidden: list to which the inputs of ReLUs are appended.
    """
    hidden = [] if hidden is None else hidden
    if head == "linear":
        return tf.add_n(pooled) + dense[0]
    if head == "tower":
        return _tower(tf.concat(pooled, axis=1), dense, hidden)
    half = len(dense) // 2
    one, other = dense[:half], dense[half:]
    product = _tower(pooled[0], one, hidden) * _tower(pooled[1], other, hidden)
    return tf.reduce_sum(product, axis=1, keepdims=True)


def train(
    data: Compact,
    rows: tuple[np.ndarray, ...],
    dense: tuple[np.ndarray, ...],
    optimizer: str,
    learning_rate: float,
    head: workloads.Head = "tower",
) -> Trained:
    """Trains on all steps of `data`, starting from `rows` and `dense`."""
    tables = [tf.Variable(value) for value in rows]
    tower = [tf.Variable(value) for value in dense]
    slots = [
        tf.Variable(tf.fill(variable.shape, _INITIAL_ACCUMULATOR))
        for variable in tables + tower
    ]
    losses = []
    kink = 1.0
    for step in data.steps:
        hidden: list[tf.Tensor] = []
        with tf.GradientTape() as tape:
            by_rank = _losses(step, tables, tower, head, hidden)
            loss = tf.add_n(by_rank)
        losses.append([float(value) for value in by_rank])
        for inputs in map(np.abs, hidden):
            kink = min(kink, float(inputs.min() / inputs.max()))
        gradients = tape.gradient(loss, tables + tower)
        for update in zip(tables + tower, gradients, slots, strict=True):
            _update(*update, optimizer, learning_rate)
    return Trained(
        np.asarray(losses),
        tuple(table.numpy() for table in tables),
        tuple(variable.numpy() for variable in tower),
        kink,
    )


def _update(
    variable: tf.Variable,
    gradient: tf.Tensor | tf.IndexedSlices,
    slot: tf.Variable,
    optimizer: str,
    learning_rate: float,
) -> None:
    change = tf.convert_to_tensor(gradient)
    if optimizer == "adagrad":
        slot.assign_add(tf.square(change))
        change /= tf.sqrt(slot + _EPSILON)
    variable.assign_sub(learning_rate * change)


def _losses(
    step: tuple[workloads.Batch, ...],
    tables: list[tf.Variable],
    dense: list[tf.Variable],
    head: workloads.Head,
    hidden: list[tf.Tensor],
) -> list[tf.Tensor]:
    samples = sum(len(batch.labels) for batch in step)
    losses = []
    for batch in step:
        pooled = [
            tf.reduce_sum(tf.gather(table, ids), axis=1)
            for table, ids in zip(tables, batch.ids, strict=True)
        ]
        entropy = tf.nn.sigmoid_cross_entropy_with_logits(
            batch.labels, logits(head, pooled, dense, hidden)
        )
        losses.append(tf.reduce_sum(entropy) / samples)
    return losses


def _tower(
    x: tf.Tensor, tower: list[tf.Variable], hidden: list[tf.Tensor]
) -> tf.Tensor:
    for kernel, bias in zip(tower[:-2:2], tower[1:-2:2], strict=True):
        hidden.append(tf.matmul(x, kernel) + bias)
        x = tf.nn.relu(hidden[-1])
    return tf.matmul(x, tower[-2]) + tower[-1]
