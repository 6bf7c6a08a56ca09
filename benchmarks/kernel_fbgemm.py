# SPDX-License-Identifier: Apache-2.0
"""Lookup, gradient and update in FBGEMM's table-batched embedding.

Runs under another Python, with torch and fbgemm-gpu-cpu and without
TensorFlow.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_embedding_configs import SparseType
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
    "sgd": (EmbOptimType.EXACT_SGD, "sgd"),
    "adagrad": (EmbOptimType.EXACT_ADAGRAD, "adagrad"),
    "row_wise_adagrad": (
        EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "rowwise_adagrad",
    ),
}


def set_threads(threads: int) -> None:
    """Before the first op."""
    torch.set_num_threads(threads)


class FbgemmTables:
    """All tables in one operator, widths padded to a multiple of 4.

    Calls the operator that the module calls, with the module's arguments, and
    so without the time of its Python code. It has no bfloat16 tables on CPUs;
    those of float16 have the same size.
    """

    def __init__(self, case: Case, padding: bool) -> None:
        self.case = case
        self.widths = [kernel_batches.padded(t.width) for t in case.tables]
        half = case.dtype == "bfloat16"
        kind, name = _OPTIMIZERS[case.optimizer]
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (t.rows, w, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for t, w in zip(case.tables, self.widths, strict=True)
            ],
            optimizer=kind,
            learning_rate=kernel_batches.LEARNING_RATE,
            eps=kernel_batches.EPSILON,
            weights_precision=SparseType.FP16 if half else SparseType.FP32,
            stochastic_rounding=False,
            # Its fastest: ours and TensorFlow's check.
            bounds_check_mode=BoundsCheckMode.NONE,
        )
        self.tables = self.module.split_embedding_weights()
        for i, table in enumerate(self.tables):
            values = kernel_batches.weights(case, i, self.widths[i])
            table.copy_(torch.from_numpy(values))
        self.name = f"split_embedding_codegen_lookup_{name}_function_pt2"
        self.operator = getattr(torch.ops.fbgemm, self.name)
        self.batches = [self._batch(case, i) for i in range(case.batches)]
        self.one_sample = self._batch(case.one_sample, 0)

    def _batch(self, case: Case, batch: int) -> tuple[Any, torch.Tensor]:
        """The arguments of the operator, and the gradient of its result."""
        lists = kernel_batches.ids(case, batch)
        lengths = [np.full(len(ids), ids.shape[1]) for ids in lists]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        flat = np.concatenate([ids.ravel() for ids in lists])
        grads = [
            kernel_batches.gradients(case, batch, width, i)
            for i, width in enumerate(self.widths)
        ]
        with mock.patch.object(torch.ops.fbgemm, self.name) as noted:
            self.module(torch.from_numpy(flat), torch.from_numpy(offsets))
        return noted.call_args, torch.from_numpy(np.hstack(grads))

    def forward(self, step: int) -> None:
        """Looks up the ids of a batch."""
        arguments, _ = self.batches[step % len(self.batches)]
        self.output = self.operator(*arguments.args, **arguments.kwargs)

    def outputs(self) -> list[np.ndarray]:
        """Results of the last lookup, per table."""
        parts = np.cumsum(self.widths)[:-1]
        return np.split(self.output.detach().numpy(), parts, axis=1)

    def call(self) -> None:
        """Looks up one sample: what a call costs, whatever it does."""
        arguments, _ = self.one_sample
        self.operator(*arguments.args, **arguments.kwargs)

    def backward(self, step: int) -> None:
        """Sums the gradients of the rows and updates them."""
        self.output.backward(self.batches[step % len(self.batches)][1])

    def rows(self, table: int, rows: np.ndarray) -> np.ndarray:
        """Values of some rows of a table."""
        found = self.tables[table][torch.from_numpy(rows)].detach()
        return found.float().numpy()

    def reset(self) -> None:
        """Nothing: nobody else updates these tables."""
