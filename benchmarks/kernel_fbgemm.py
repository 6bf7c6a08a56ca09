# SPDX-License-Identifier: Apache-2.0
"""Lookup, gradient and update in FBGEMM's table-batched embedding.

Runs under another Python, with torch and fbgemm-gpu-cpu and without
TensorFlow.
"""

from __future__ import annotations

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    BoundsCheckMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    EmbeddingLocation,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks import kernel_batches
from benchmarks.kernel_batches import Case

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "row_wise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def set_threads(threads: int) -> None:
    """Before the first op."""
    torch.set_num_threads(threads)


class FbgemmTables:
    """All tables in one operator, widths padded to a multiple of 4."""

    def __init__(self, case: Case, padding: bool) -> None:
        self.case = case
        self.widths = [kernel_batches.padded(t.width) for t in case.tables]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (t.rows, w, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for t, w in zip(case.tables, self.widths, strict=True)
            ],
            optimizer=_OPTIMIZERS[case.optimizer],
            learning_rate=kernel_batches.LEARNING_RATE,
            eps=kernel_batches.EPSILON,
            # Its fastest: ours and TensorFlow's check.
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self.tables = self.module.split_embedding_weights()
        for i, table in enumerate(self.tables):
            values = kernel_batches.weights(case, i, self.widths[i])
            table.copy_(torch.from_numpy(values))
        self.batches = [self._batch(case, i) for i in range(case.batches)]
        self.one_sample = self._batch(case.one_sample, 0)

    def _batch(self, case: Case, batch: int) -> tuple[torch.Tensor, ...]:
        lists = kernel_batches.ids(case, batch)
        lengths = [np.full(len(ids), ids.shape[1]) for ids in lists]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        flat = np.concatenate([ids.ravel() for ids in lists])
        grads = [
            kernel_batches.gradients(case, batch, width, i)
            for i, width in enumerate(self.widths)
        ]
        return tuple(map(torch.from_numpy, (flat, offsets, np.hstack(grads))))

    def forward(self, step: int) -> list[np.ndarray]:
        """Looks up the ids of a batch."""
        ids, offsets, _ = self.batches[step % len(self.batches)]
        self.output = self.module(ids, offsets)
        parts = np.cumsum(self.widths)[:-1]
        return np.split(self.output.detach().numpy(), parts, axis=1)

    def call(self) -> None:
        """Looks up one sample: what a call costs, whatever it does."""
        self.module(*self.one_sample[:2]).detach().numpy()

    def backward(self, step: int) -> None:
        """Sums the gradients of the rows and updates them."""
        self.output.backward(self.batches[step % len(self.batches)][2])

    def rows(self, table: int, rows: np.ndarray) -> np.ndarray:
        """Values of some rows of a table."""
        return self.tables[table][torch.from_numpy(rows)].detach().numpy()

    def reset(self) -> None:
        """Nothing: nobody else updates these tables."""
