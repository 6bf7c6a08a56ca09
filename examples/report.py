# SPDX-License-Identifier: Apache-2.0
"""What a training run cost: steps per second, bytes, seconds per stage."""

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# How labels of exchanges end, and what they are in the data flow of a step.
_STAGES = {
    "/ids": "input_dist",
    "/results": "output_dist",
    "/results/gradient": "output_dist, backward",
    "gradients": "all_reduce, dense gradients",
}


class Meter(tf.keras.callbacks.Callback):
    """Adds up time and traffic of the training steps.

    The first step of every epoch (which compiles, or fills the input pipeline)
    and the validation are left out.

    Attributes:
      steps: Steps measured.
      seconds: Wall time of these steps.
      bytes_sent: Bytes this rank sent in them.
      stages: Seconds of the exchanges made in every step. Waiting for the
        slowest rank is included, and exchanges may overlap.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self.steps = 0
        self.seconds = 0.0
        self.bytes_sent = 0
        self.stages: dict[str, float] = {}
        self._strategy = strategy
        self._start: tuple[int, float, Mapping[str, Any]] | None = None
        self._batch = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batch = batch
        if self._start is None:
            statistics = self._strategy.statistics()
            self._start = (batch, time.perf_counter(), statistics)

    def on_test_begin(self, logs: Any = None) -> None:
        self._stop()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._start is None:
            return
        batch, began, before = self._start
        now = self._strategy.statistics()
        self._start = None
        self.steps += self._batch - batch
        self.seconds += time.perf_counter() - began
        self.bytes_sent += now.get("bytes_sent", 0)
        self.bytes_sent -= before.get("bytes_sent", 0)
        earlier = before.get("labels", {})
        for label, (calls, _, seconds) in now.get("labels", {}).items():
            calls_before, _, seconds_before = earlier.get(label, (0, 0, 0.0))
            if calls - calls_before >= self._batch - batch:
                spent = self.stages.get(stage_of(label), 0.0)
                spent += seconds - seconds_before
                self.stages[stage_of(label)] = spent


def stage_of(label: str) -> str:
    """Name in the report for the exchanges with a label."""
    for ending, stage in _STAGES.items():
        if label.endswith(ending):
            return stage
    return label


@dataclasses.dataclass(frozen=True)
class StockTraffic:
    """Bytes that a stock strategy would send, computed and not measured.

    Attributes:
      world_size: Ranks.
      rows: Rows of the sparse table.
      dim: Its columns.
      unique_rows: Different rows that the batch of one rank touches.
      dense_weights: Weights outside of the table.
    """

    world_size: int
    rows: int
    dim: int
    unique_rows: float
    dense_weights: int

    def touched_rows(self) -> float:
        """Per step and rank, when the gradient is an IndexedSlices.

        It is all-gathered: the rows touched by a rank, with an int64 id each,
        go to every other rank. The dense weights are all-reduced.
        """
        slices = self.unique_rows * (4 * self.dim + 8)
        return slices * (self.world_size - 1) + self._all_reduce(
            self.dense_weights
        )

    def dense(self) -> float:
        """Per step and rank, when the gradient is dense: all is all-reduced."""
        return self._all_reduce(self.rows * self.dim + self.dense_weights)

    def _all_reduce(self, weights: int) -> float:
        """A ring sends every float32 twice, except for a rank's own part."""
        return 2 * 4 * weights * (self.world_size - 1) / self.world_size


def unique_rows(
    batches: tf.data.Dataset, world_size: int, samples: int = 10
) -> float:
    """Mean number of different ids in one rank's part of a batch.

    Args:
      batches: Global batches whose features hold `"ids"`, int `[b, k]`.
      world_size: Ranks that share a batch.
      samples: Batches to look at.
    """
    counts = []
    for features, _ in batches.take(samples):
        ids = features["ids"].numpy()
        for part in np.array_split(ids, world_size):
            counts.append(np.unique(part).size)
    return float(np.mean(counts)) if counts else 0.0


def table(
    meter: Meter, stock: StockTraffic, scores: Mapping[str, float]
) -> str:
    """The report as text, one figure per line."""
    steps = max(meter.steps, 1)
    rows = [(name, f"{value:.4f}") for name, value in scores.items()]
    rows.append(("ranks", str(stock.world_size)))
    rows.append(("steps/s", f"{meter.steps / max(meter.seconds, 1e-9):.1f}"))
    rows.append(("bytes sent per step and rank:", ""))
    for name, value in traffic(meter, stock).items():
        rows.append((f"  {name}", format_bytes(value)))
    rows.append(("milliseconds per step, exchanges may overlap:", ""))
    for stage, seconds in meter.stages.items():
        rows.append((f"  {stage}", f"{1e3 * seconds / steps:.2f}"))
    whole = f"{1e3 * meter.seconds / steps:.2f}"
    rows.append(("  whole step", whole))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>12}" for name, value in rows)


def traffic(meter: Meter, stock: StockTraffic) -> dict[str, float]:
    """Bytes per step and rank: ours measured, a stock strategy's computed."""
    return {
        "this run (measured)": meter.bytes_sent / max(meter.steps, 1),
        "stock, touched rows (computed)": stock.touched_rows(),
        "stock, dense gradient (computed)": stock.dense(),
    }


def format_bytes(count: float) -> str:
    """`count` with a decimal unit, as network speeds are given."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def plot(
    path: str | pathlib.Path,
    history: Mapping[str, Sequence[float]],
    meter: Meter,
    stock: StockTraffic,
) -> None:
    """Draws the run as a PNG of four panels.

    Args:
      path: File to write.
      history: Values per epoch, as `fit` returns them.
      meter: The measured part.
      stock: What to compare the traffic with.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2)
    _plot_curves(panels[0, 0], history, "loss")
    _plot_curves(panels[0, 1], history, "auc")
    sent = {
        name.replace(" (", "\n("): count / 1e6
        for name, count in traffic(meter, stock).items()
    }
    _plot_bars(panels[1, 0], "MB sent per step and rank", sent, "%.4g")
    steps = max(meter.steps, 1)
    times = {name: 1e3 * v / steps for name, v in meter.stages.items()}
    times["whole step"] = 1e3 * meter.seconds / steps
    _plot_bars(panels[1, 1], "milliseconds per step, rank 0", times, "%.2f")
    figure.suptitle(f"Ranks: {stock.world_size}")
    figure.savefig(path, dpi=120)


def _plot_curves(
    panel: Any, history: Mapping[str, Sequence[float]], name: str
) -> None:
    """Training and validation values of one metric over the epochs."""
    for key, label in ((name, "training"), (f"val_{name}", "validation")):
        values = history.get(key, [])
        panel.plot(range(1, len(values) + 1), values, marker="o", label=label)
    panel.set(title=name, xlabel="epoch")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend()


def _plot_bars(
    panel: Any, title: str, values: Mapping[str, float], form: str
) -> None:
    bars = panel.barh(list(values), list(values.values()))
    panel.bar_label(bars, fmt=form, padding=3)
    panel.set(title=title)
    panel.set_xlim(0, 1.25 * max(values.values()) or 1)
    panel.invert_yaxis()
