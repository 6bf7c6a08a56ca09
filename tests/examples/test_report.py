# SPDX-License-Identifier: Apache-2.0
"""The report of a run."""

import pathlib

import numpy as np
import pytest
import report
import tensorflow as tf


class Counters:
    """Counts ten exchanges, a kilobyte and a millisecond whenever asked."""

    def __init__(self) -> None:
        self.asked = 0

    def statistics(self) -> dict:
        self.asked += 1
        labels = {
            "table/ids": (self.asked * 10, 10, self.asked * 0.001),
            "initial_value/kernel": (1, 10, 0.5),
        }
        return {"bytes_sent": self.asked * 1000, "labels": labels}


def test_meter_leaves_out_first_steps_and_validation() -> None:
    meter = report.Meter(Counters())
    for _ in range(2):
        for batch in range(5):
            meter.on_train_batch_end(batch)
        meter.on_test_begin()
        meter.on_epoch_end(0)
    assert meter.steps == 8
    assert meter.bytes_sent == 2000  # One question to the next, twice.
    assert meter.stages == {"input_dist": pytest.approx(0.002)}
    assert meter.seconds > 0


def test_meter_of_a_single_process() -> None:
    class Nothing:
        def statistics(self) -> dict:
            return {}

    meter = report.Meter(Nothing())
    meter.on_train_batch_end(0)
    meter.on_train_batch_end(1)
    meter.on_epoch_end(0)
    assert (meter.steps, meter.bytes_sent, meter.stages) == (1, 0, {})


@pytest.mark.parametrize(
    ("label", "stage"),
    [
        ("table/ids", "input_dist"),
        ("table/results", "output_dist"),
        ("table/results/gradient", "output_dist, backward"),
        ("logs", "logs"),
    ],
)
def test_stage_of(label: str, stage: str) -> None:
    assert report.stage_of(label) == stage


def test_stock_traffic() -> None:
    stock = report.StockTraffic(
        world_size=4, rows=1000, dim=10, unique_rows=50, dense_weights=200
    )
    # Three peers get 50 rows of ten floats and an id each.
    dense_part = 2 * 200 * 4 * 3 / 4
    assert stock.touched_rows() == 3 * 50 * (40 + 8) + dense_part
    assert stock.dense() == 2 * 1000 * 10 * 4 * 3 / 4 + dense_part


def test_a_single_rank_sends_nothing() -> None:
    stock = report.StockTraffic(1, 1000, 10, 50, 200)
    assert stock.touched_rows() == stock.dense() == 0


def test_unique_rows_of_a_rank() -> None:
    ids = np.array([[0, 1], [1, 1], [2, 3], [4, 5]])
    batches = tf.data.Dataset.from_tensors(({"ids": ids}, [0, 0, 0, 0]))
    assert report.unique_rows(batches, world_size=1) == 6
    assert report.unique_rows(batches, world_size=2) == 3  # 2 and 4.


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.234 kB"),
        (5e6, "5 MB"),
        (2e9, "2 GB"),
        (1.5e13, "1.5e+04 GB"),
    ],
)
def test_format_bytes(count: float, text: str) -> None:
    assert report.format_bytes(count) == text


def test_table_and_plot(tmp_path: pathlib.Path) -> None:
    meter = report.Meter(Counters())
    meter.steps, meter.seconds, meter.bytes_sent = 10, 0.5, 20_000
    meter.stages = {"lookup": 0.1}
    stock = report.StockTraffic(2, 1000, 10, 50, 200)
    text = report.table(meter, stock, {"loss": 0.25})
    lines = dict(line.rsplit("  ", 1) for line in text.splitlines())
    values = {name.strip(): value.strip() for name, value in lines.items()}
    assert values["loss"] == "0.2500"
    assert values["steps/s"] == "20.0"
    assert values["this run (measured)"] == "2 kB"
    assert values["lookup"] == "10.00"
    assert values["whole step"] == "50.00"
    path = tmp_path / "report.png"
    pytest.importorskip("matplotlib")
    history = {"loss": [1.0, 0.5], "val_loss": [1.0, 0.7], "auc": [0.5, 0.6]}
    report.plot(path, history, meter, stock)
    assert path.read_bytes().startswith(b"\x89PNG")
