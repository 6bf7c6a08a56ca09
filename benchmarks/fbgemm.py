# SPDX-License-Identifier: Apache-2.0
"""FBGEMM's CPU tables and a torch tower in one process, as a task of its own.

Runs in an environment that has torch and fbgemm_gpu but no TensorFlow. All
tables are one `SplitTableBatchedEmbeddingBags`, updated in its backward pass.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from benchmarks import errors
from benchmarks import measure
from benchmarks import rank
from benchmarks import workloads

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
}

# Keras's defaults for Adagrad, and the range of the other variants' rows.
_INITIAL_ACCUMULATOR = 0.1
_EPSILON = 1e-7
_INITIAL_RANGE = 1e-2

# Widths must be multiples of this.
_PAD = 4

# As in `training.py`, which needs TensorFlow.
_DISTINCT_BATCHES = 16
_FIRST_TIMED_STEP = 1000

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def run_rank(context: rank.RankContext) -> dict[str, Any]:
    """Checks against plain torch, then times; returns what was measured.

    Raises:
        rank.CheckError: a loss is not finite.
    """
    options = context.options
    trainee = Trainee(workloads.WORKLOADS[options["workload"]], options)
    found = _check(trainee, options)
    first = _FIRST_TIMED_STEP
    batches = _batches(trainee.workload, options, first, _DISTINCT_BATCHES)
    inputs = [trainee.inputs(batch) for batch in batches]
    losses: list[float] = []

    def step(index: int) -> None:
        losses.append(trainee.step(inputs[index % len(inputs)]))

    warm_up = measure.time_steps(step, options["warm_up"])
    steps = measure.steps_in_budget(
        warm_up[1:] or warm_up, options["seconds"], options["steps"]
    )
    before = measure.sample("")
    seconds = measure.time_steps(step, steps)
    after = measure.sample("")
    if not math.isfinite(sum(losses)):
        raise rank.CheckError(f"Loss is not finite after {steps} steps")
    return {
        "steps": steps,
        "step_ms": measure.quantiles_ms(seconds),
        "per_step": measure.per_step(before, after, steps),
        "errors": found,
        "problem": errors.problem(found, "float32"),
        "note": "one process",
        "peak_rss_bytes": measure.peak_rss_bytes(),
    }


class Trainee:
    """FBGEMM's tables, a head in torch, and their optimizers."""

    def __init__(self, workload: workloads.Workload, options: dict[str, Any]):
        self.workload = workload
        self.padded = [-(-t.width // _PAD) * _PAD for t in workload.tables]
        host, cpu = tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU
        self.bags = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (table.rows, width, host, cpu)
                for table, width in zip(
                    workload.tables, self.padded, strict=True
                )
            ],
            optimizer=_OPTIMIZERS[options["optimizer"]],
            learning_rate=options["learning_rate"],
            eps=_EPSILON,
        )
        self.bags.init_embedding_weights_uniform(
            -_INITIAL_RANGE, _INITIAL_RANGE
        )
        for states in self.bags.split_optimizer_states():
            for state in states:
                state.fill_(_INITIAL_ACCUMULATOR)
        self.head = Head(workload)
        self.optimizer = _make_optimizer(self.head.parameters(), options)

    def inputs(self, batch: workloads.Batch) -> Inputs:
        """Returns ids, offsets (both table by table) and labels."""
        samples = len(batch.labels)
        lengths = [
            t.hotness for t in self.workload.tables for _ in range(samples)
        ]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = np.concatenate([ids.reshape(-1) for ids in batch.ids])
        return (
            torch.from_numpy(ids),
            torch.from_numpy(offsets),
            torch.from_numpy(batch.labels),
        )

    def step(self, inputs: Inputs) -> float:
        """Trains on one batch; returns its mean loss."""
        ids, offsets, labels = inputs
        parts = torch.split(self.bags(ids, offsets), self.padded, dim=1)
        pooled = [
            part[:, : table.width]
            for part, table in zip(parts, self.workload.tables, strict=True)
        ]
        return _descend(self.head(pooled), labels, self.optimizer)

    def rows(self, touched: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Returns copies of rows, one per id, per table."""
        return tuple(
            weights[torch.from_numpy(ids), : table.width].numpy().copy()
            for weights, ids, table in zip(
                self.bags.split_embedding_weights(),
                touched,
                self.workload.tables,
                strict=True,
            )
        )


class Head(torch.nn.Module):
    """A workload's head (`workloads.Head`)."""

    def __init__(self, workload: workloads.Workload):
        super().__init__()
        self.kind = workload.head
        self.towers = torch.nn.ModuleList(map(_make_tower, workload.layers))
        if self.kind == "linear":
            self.bias = torch.nn.Parameter(torch.full((1,), 0.5))

    def forward(self, pooled: list[torch.Tensor]) -> torch.Tensor:
        """Maps per-table results to logits `[batch_size, 1]`."""
        if self.kind == "linear":
            return sum(pooled) + self.bias
        if self.kind == "tower":
            return self.towers[0](torch.cat(pooled, dim=1))
        one, other = (t(x) for t, x in zip(self.towers, pooled, strict=True))
        return (one * other).sum(dim=1, keepdim=True)

    def arrays(self) -> tuple[np.ndarray, ...]:
        """Returns copies of the parameters."""
        return tuple(p.detach().numpy().copy() for p in self.parameters())


def _make_tower(layers: tuple[tuple[int, int], ...]) -> torch.nn.Sequential:
    tower: list[torch.nn.Module] = []
    for inputs, outputs in layers:
        linear = torch.nn.Linear(inputs, outputs)
        torch.nn.init.constant_(linear.bias, 0.5)
        tower += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*tower[:-1])


def _make_optimizer(
    parameters: Iterator[torch.nn.Parameter], options: dict[str, Any]
) -> torch.optim.Optimizer:
    rate = options["learning_rate"]
    if options["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    return torch.optim.Adagrad(
        parameters,
        lr=rate,
        initial_accumulator_value=_INITIAL_ACCUMULATOR,
        eps=_EPSILON,
    )


def _descend(
    logits: torch.Tensor,
    labels: torch.Tensor,
    optimizer: torch.optim.Optimizer,
) -> float:
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def _batches(
    workload: workloads.Workload,
    options: dict[str, Any],
    first: int,
    count: int,
) -> list[workloads.Batch]:
    size, seed = options["batch"], options["seed"]
    return [
        workloads.make_batch(workload, size, step, 0, seed)
        for step in range(first, first + count)
    ]


def _check(trainee: Trainee, options: dict[str, Any]) -> dict[str, float]:
    """Trains the check's steps here and with plain torch; returns errors."""
    batches = _batches(trainee.workload, options, 0, options["check_steps"])
    touched = tuple(
        np.unique([batch.ids[table] for batch in batches])
        for table in range(len(trainee.workload.tables))
    )
    rows, dense = trainee.rows(touched), trainee.head.arrays()
    head = Head(trainee.workload)
    head.load_state_dict(trainee.head.state_dict())
    tables = [torch.nn.Parameter(torch.from_numpy(r.copy())) for r in rows]
    optimizer = _make_optimizer([*tables, *head.parameters()], options)
    want = []
    for batch in batches:
        pooled = [
            table[torch.from_numpy(np.searchsorted(known, ids))].sum(dim=1)
            for table, known, ids in zip(
                tables, touched, batch.ids, strict=True
            )
        ]
        labels = torch.from_numpy(batch.labels)
        want.append(_descend(head(pooled), labels, optimizer))
    got = [trainee.step(trainee.inputs(batch)) for batch in batches]
    new_rows = tuple(table.detach().numpy() for table in tables)
    return {
        "rows": errors.change_error(trainee.rows(touched), new_rows, rows),
        "dense": errors.change_error(
            trainee.head.arrays(), head.arrays(), dense
        ),
        "loss": float(np.max(np.abs(np.divide(got, want) - 1))),
    }
