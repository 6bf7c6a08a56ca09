# SPDX-License-Identifier: Apache-2.0
"""Lookup, gradient and update in TensorFlow: ours, and of stock ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import kernel_batches
from benchmarks.kernel_batches import BETAS
from benchmarks.kernel_batches import EPSILON
from benchmarks.kernel_batches import LEARNING_RATE
from benchmarks.kernel_batches import Case
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops.library import library

_TABLES: dict[tuple[int, int], tf.Variable] = {}
Output = list[tf.Tensor]


def set_threads(threads: int) -> None:
    """Before the first op."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)


def _table(case: Case, i: int, width: int) -> tf.Variable:
    """Ours and stock share the tables: those of `ads` have a gigabyte."""
    if (i, width) not in _TABLES:
        values = kernel_batches.weights(case, i, width)
        _TABLES[i, width] = tf.Variable(
            np.ascontiguousarray(values), dtype=case.dtype
        )
    return _TABLES[i, width]


class _Tables:
    """Tables with the batches as tensors.

    Args:
        case: what is timed.
        padding: whether to pad the width to what FBGEMM can do.

    Attributes:
        as_function: whether a step is one `tf.function`, which costs a call to
            another thread, or its ops are called as torch calls FBGEMM's.
        output: what the last lookup returned.
    """

    as_function: bool

    def __init__(self, case: Case, padding: bool) -> None:
        self.case = case
        self.widths = [
            kernel_batches.padded(t.width) if padding else t.width
            for t in case.tables
        ]
        self.tables = [_table(case, i, w) for i, w in enumerate(self.widths)]
        self.batches = [self._batch(case, i) for i in range(case.batches)]
        self.one_sample = self._batch(case.one_sample, 0)
        self.forward_step = self._forward
        self.backward_step = self._backward
        if self.as_function:
            self.forward_step = tf.function(self._forward)
            self.backward_step = tf.function(self._backward)

    def _batch(self, case: Case, batch: int) -> Any:
        raise NotImplementedError

    def _forward(self, batch: Any) -> Output:
        raise NotImplementedError

    def _backward(self, batch: Any) -> None:
        raise NotImplementedError

    def forward(self, step: int) -> None:
        """Looks up the ids of a batch; waits for the result."""
        batch = self.batches[step % len(self.batches)]
        self.output = self.forward_step(batch)

    def outputs(self) -> list[np.ndarray]:
        """Results of the last lookup, per table."""
        return [tf.cast(each, tf.float32).numpy() for each in self.output]

    def call(self) -> None:
        """Looks up one sample: what a call costs, whatever it does."""
        self.forward_step(self.one_sample)

    def backward(self, step: int) -> None:
        """Sums the gradients of the rows and updates them; waits."""
        self.backward_step(self.batches[step % len(self.batches)])

    def rows(self, table: int, rows: np.ndarray) -> np.ndarray:
        """Values of some rows of a table."""
        return tf.cast(tf.gather(self.tables[table], rows), tf.float32).numpy()

    def reset(self) -> None:
        """Gives the rows of the first batch their initial values."""
        for i, table in enumerate(self.tables):
            rows = kernel_batches.touched(self.case, i)
            values = kernel_batches.weights(self.case, i, self.widths[i])
            values = tf.cast(values[rows], table.dtype)
            table.scatter_update(tf.IndexedSlices(values, rows))


_SLOTS = {"sgd": 0, "adagrad": 1, "row_wise_adagrad": 1, "adam": 2}


def _rule(optimizer: str) -> optimizer_ops.RowRule:
    rate = {"learning_rate": LEARNING_RATE}
    if optimizer == "sgd":
        return optimizer_ops.sgd(**rate)
    if optimizer == "adam":
        step = tf.constant(1, tf.int64)
        betas = dict(zip(("beta_1", "beta_2"), BETAS, strict=True))
        return optimizer_ops.adam(**rate, **betas, epsilon=EPSILON, step=step)
    return getattr(optimizer_ops, optimizer)(**rate, epsilon=EPSILON)


class OursTables(_Tables):
    """The ops of tfdist_ext, as a step calls them: each for all tables.

    A step is a graph, which has the arguments ready, so they are prepared here
    as well. The attributes of a lookup for its gradient are left out.
    """

    as_function = False

    def __init__(self, case: Case, padding: bool) -> None:
        super().__init__(case, padding)
        per_row = case.optimizer == "row_wise_adagrad"
        self.slots = [
            [
                tf.Variable(
                    tf.zeros(table.shape[:1] if per_row else table.shape)
                )
                for _ in range(_SLOTS[case.optimizer])
            ]
            for table in self.tables
        ]
        self.handles = [table.handle for table in self.tables]
        self.rule = _rule(case.optimizer)
        self.ones = tf.zeros([0])
        self.features = list(range(len(self.tables)))

    def _batch(self, case: Case, batch: int) -> tuple[tf.Tensor, ...]:
        ids = kernel_batches.ids(case, batch)
        lengths = np.concatenate([np.full(len(i), i.shape[1]) for i in ids])
        grads = [
            kernel_batches.gradients(case, batch, width, i).ravel()
            for i, width in enumerate(self.widths)
        ]
        made = (
            np.concatenate([[0], np.cumsum(lengths)]),
            np.concatenate([i.ravel() for i in ids]),
            np.concatenate(grads),
            np.array([[len(i) for i in ids]]),
        )
        return tuple(map(tf.constant, made))

    def _forward(self, batch: Any) -> Output:
        row_splits, rows, _, served = batch
        values, _ = library().tfdist_lookup(
            self.handles,
            row_splits,
            rows,
            self.ones,
            served,
            feature_tables=self.features,
            table_shapes=[],
            shards=[],
        )
        return [values]

    def outputs(self) -> list[np.ndarray]:
        """Results of the last lookup, per table; as FBGEMM's, one array."""
        sizes = self.case.batch_size * np.array(self.widths)
        parts = np.split(self.output[0].numpy(), np.cumsum(sizes)[:-1])
        return [
            part.reshape(-1, width)
            for part, width in zip(parts, self.widths, strict=True)
        ]

    def _backward(self, batch: Any) -> None:
        row_splits, rows, grads, served = batch
        optimizer_ops.update_looked_up_rows(
            self.rule,
            self.tables,
            self.slots,
            row_splits,
            rows,
            self.ones,
            served,
            grads,
            feature_tables=self.features,
        )


class StockTables(_Tables):
    """`embedding_lookup_sparse`, its gradient, and stock's sparse update.

    Stock has no row-wise Adagrad and is measured with ordinary Adagrad.
    """

    # A dozen ops, slower one by one.
    as_function = True

    def __init__(self, case: Case, padding: bool) -> None:
        super().__init__(case, padding)
        if "adagrad" in case.optimizer:
            self.slots = [tf.Variable(tf.zeros(t.shape)) for t in self.tables]

    def _batch(self, case: Case, batch: int) -> list[tuple[Any, ...]]:
        made = []
        for i, ids in enumerate(kernel_batches.ids(case, batch)):
            sparse = tf.SparseTensor(
                np.argwhere(np.ones(ids.shape, bool)), ids.ravel(), ids.shape
            )
            grad = kernel_batches.gradients(case, batch, self.widths[i], i)
            # What the lookup has computed already when its gradient begins.
            unique, positions = tf.unique(sparse.values)
            samples = tf.cast(sparse.indices[:, 0], tf.int32)
            known = (unique, positions, samples)
            made.append((sparse, tf.constant(grad), known))
        return made

    def _forward(self, batch: Any) -> Output:
        return [
            tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
            for table, (ids, *_) in zip(self.tables, batch, strict=True)
        ]

    def _backward(self, batch: Any) -> None:
        for i, (_, grad, known) in enumerate(batch):
            unique, positions, samples = known
            # The op that TensorFlow's gradient of the lookup runs.
            values = tf.raw_ops.SparseSegmentSumGrad(
                grad=grad,
                indices=positions,
                segment_ids=samples,
                output_dim0=tf.size(unique),
            )
            self._update(i, tf.IndexedSlices(values, unique))

    def _update(self, i: int, slices: tf.IndexedSlices) -> None:
        # The rows are distinct: the lookup itself works on distinct ids.
        if self.case.optimizer == "sgd":
            steps = LEARNING_RATE * slices.values
            self.tables[i].scatter_sub(tf.IndexedSlices(steps, slices.indices))
            return
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self.tables[i].handle,
            accum=self.slots[i].handle,
            lr=LEARNING_RATE,
            epsilon=EPSILON,
            grad=slices.values,
            indices=slices.indices,
        )
