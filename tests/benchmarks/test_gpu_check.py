# SPDX-License-Identifier: Apache-2.0
"""What `make gpu-check` says of what it has measured; GPUs are not needed."""

import csv
import pathlib

import numpy as np
import pytest

from benchmarks.gpu import check
from benchmarks.gpu import timing
from benchmarks.gpu import torch_bags
from benchmarks.gpu import train

ONE = train.EXAMPLES[:1]
EPOCHS = "9/9 - 1s - accuracy: 0.6 - loss: {}\n9/9 - loss: {}\n"


def printed(ranks: int, *losses: float) -> str:
    """What all ranks print, the last one first."""
    text = EPOCHS.format(*losses)
    others = [
        f"[{rank}] {line}"
        for rank in range(ranks - 1, 0, -1)
        for line in text.splitlines()
    ]
    return "\n".join([*others, text])


def test_goals_are_passed_or_missed(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = np.linspace(1, 3, 20)  # the median is 2 ms: 100 GB/s
    rows = [
        timing.row(name, 32, 200_000_000, times, bandwidth, goal)
        for name, bandwidth, goal in [
            ("copy", 100.0, 0.0),
            ("lookup", 110.0, timing.LOOKUP_GOAL),
            ("gradient", 200.0, timing.UPDATE_GOAL),
            ("torch lookup", 500.0, 0.0),
        ]
    ]
    assert check.report(rows, tmp_path / "gpu.csv") == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("91%  85% pass")
    assert lines[3].endswith("50%  60% miss")
    assert lines[4].endswith("20%")
    with (tmp_path / "gpu.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["kernel"] for row in written][-1] == "torch lookup"
    assert float(written[1]["of_copy"]) == pytest.approx(100 / 110)


def test_losses_on_gpus_are_those_of_a_cpu(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(example: train.Example, ranks: int, device: str) -> str:
        return printed(ranks, 0.7, 0.501 if device == "gpu" else 0.5)

    path = tmp_path / "training.csv"
    assert train.report(train.check(run, ONE), path) == 0
    assert "wrong" not in capsys.readouterr().out
    assert path.read_text().count("0.7 0.501,0.7 0.5,True") == 2


def test_rank_0_may_speak_for_all_and_packages_may_be_missing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(example: train.Example, ranks: int, device: str) -> str:
        assert example.script == "sasrec.py"
        return f"loss: 0.9 to {0.5 if device == 'cpu' else 0.502}\n"

    sasrec = next(e for e in train.EXAMPLES if e.script == "sasrec.py")
    lacking = train.Example("serve.py", needs="no_such_package")
    path = tmp_path / "training.csv"
    assert train.report(train.check(run, [lacking, sasrec]), path) == 0
    assert "serve.py: left out, no_such_package" in capsys.readouterr().out
    assert path.read_text().count("0.502,0.5,True") == 2


@pytest.mark.parametrize(
    "got",
    [
        printed(2, 0.7, 0.6),
        printed(1, 0.7, 0.5),
        printed(2, 0.7, 0.5).replace("0.5", "0.6", 1),
        "",
        "loss: nan\n[1] loss: nan\n" * 2,
    ],
)
def test_other_losses_are_wrong(tmp_path: pathlib.Path, got: str) -> None:
    def run(example: train.Example, ranks: int, device: str) -> str:
        return got if ranks == 2 else EPOCHS.format(0.7, 0.5)

    assert train.report(train.check(run, ONE), tmp_path / "training.csv") == 1


def test_a_training_that_fails_is_wrong(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(example: train.Example, ranks: int, device: str) -> str:
        if device == "gpu":
            raise RuntimeError("no kernel image")
        return EPOCHS.format(0.7, 0.5)

    assert train.report(train.check(run, ONE), tmp_path / "training.csv") == 2
    assert capsys.readouterr().out.count("no kernel image") == 2


@pytest.mark.parametrize(
    ("wrong", "missed", "why", "failed", "code"),
    [
        (0, 0, "", 0, 0),
        (0, 0, "TensorFlow sees no GPU", 9, 0),
        (0, 2, "", 0, check.MISSED),
        (0, 2, "", 1, check.WRONG),
        (3, 0, "", 0, check.WRONG),
    ],
)
def test_the_exit_code_says_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    wrong: int,
    missed: int,
    why: str,
    failed: int,
    code: int,
) -> None:
    class OneGpu:
        def __init__(self, library: object) -> None: ...

        def count(self) -> int:
            return 1

    monkeypatch.setattr(check.build, "build", lambda *_: "kernels.so")
    monkeypatch.setattr(check, "Device", OneGpu)
    monkeypatch.setattr(check, "check_all", lambda *_: wrong)
    monkeypatch.setattr(check, "report", lambda *_: missed)
    monkeypatch.setattr(train, "missing", lambda: why)
    monkeypatch.setattr(train, "report", lambda *_: failed)
    assert check.main(["--folder", str(tmp_path)]) == code


def test_what_cannot_be_compared_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "measure", lambda device: iter(()))
    monkeypatch.setattr(torch_bags, "missing", lambda: "no module torch")
    assert list(check.rows_of(device=None)) == []
    assert "FBGEMM: left out, no module torch" in capsys.readouterr().out
