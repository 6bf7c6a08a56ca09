# SPDX-License-Identifier: Apache-2.0
"""The same lookups and updates in PyTorch and FBGEMM, where they are.

`torch.nn.EmbeddingBag` and FBGEMM's table-batched embeddings, both with
Adagrad; ours writes a gradient and updates by it, in two steps.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.gpu import timing

Step = Callable[[], Any]


def missing() -> str:
    """Says why there is nothing to compare with; empty if there is."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return f"{error}"
    return "" if torch.cuda.is_available() else "this torch sees no GPU"


def measure(bandwidth: float) -> Iterator[timing.Row]:
    """Times what is there, on the GPU.

    Args:
        bandwidth: of a copy, in GB/s.

    Yields:
        A row for each width and kind, without a goal.
    """
    torch = importlib.import_module("torch")
    kinds = {"torch": bags}
    if importlib.util.find_spec("fbgemm_gpu") is not None:
        kinds["fbgemm"] = fbgemm
    for width in timing.WIDTHS:
        for name, make in kinds.items():
            lookup, update = make(torch, width, "cuda")
            sizes = timing.bytes_moved(width)
            for what, step in (("lookup", lookup), ("update", update)):
                yield timing.row(
                    f"{name} {what}",
                    width,
                    sizes[what],
                    timed(torch, step),
                    bandwidth,
                    0.0,
                )
            del lookup, update
            torch.cuda.empty_cache()


def timed(torch: Any, step: Step) -> np.ndarray:
    """As `timing.timed`, by the events of PyTorch."""
    for _ in range(3):
        step()
    times = []
    for _ in range(timing.REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return np.array(times)


def batch(torch: Any, device: str) -> tuple[Any, Any]:
    """Rows and offsets of the batch that our kernels get."""
    rows = timing.random_rows(timing.SAMPLES * timing.HOTNESS)
    offsets = np.arange(timing.SAMPLES + 1) * timing.HOTNESS
    return (
        torch.from_numpy(rows).to(device),
        torch.from_numpy(offsets).to(device),
    )


def bags(torch: Any, width: int, device: str) -> tuple[Step, Step]:
    """Returns a lookup by `EmbeddingBag`, and its backward pass and update."""
    rows, offsets = batch(torch, device)
    bag = torch.nn.EmbeddingBag(
        timing.TABLE_ROWS, width, mode="sum", sparse=True, device=device
    )
    optimizer = torch.optim.Adagrad(bag.parameters(), lr=0.01)
    grad = torch.ones(timing.SAMPLES, width, device=device)
    looked_up = bag(rows, offsets[:-1])

    def lookup() -> None:
        with torch.no_grad():
            bag(rows, offsets[:-1])

    def update() -> None:
        optimizer.zero_grad()
        looked_up.backward(grad, retain_graph=True)
        optimizer.step()

    return lookup, update


def fbgemm(torch: Any, width: int, device: str) -> tuple[Step, Step]:
    """The same of FBGEMM, which updates in its backward pass."""
    ops = importlib.import_module(
        "fbgemm_gpu.split_table_batched_embeddings_ops_training"
    )
    configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    on_gpu = device == "cuda"
    place = ops.EmbeddingLocation
    bag = ops.SplitTableBatchedEmbeddingBagsCodegen(
        [
            (
                timing.TABLE_ROWS,
                width,
                place.DEVICE if on_gpu else place.HOST,
                ops.ComputeDevice.CUDA if on_gpu else ops.ComputeDevice.CPU,
            )
        ],
        optimizer=configs.EmbOptimType.EXACT_ADAGRAD,
        learning_rate=0.01,
    )
    rows, offsets = batch(torch, device)
    grad = torch.ones(timing.SAMPLES, width, device=device)
    looked_up = bag(rows, offsets)

    def lookup() -> None:
        with torch.no_grad():
            bag(rows, offsets)

    return lookup, lambda: looked_up.backward(grad, retain_graph=True)
