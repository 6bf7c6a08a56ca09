# SPDX-License-Identifier: Apache-2.0
"""The examples from end to end, at one and at several ranks."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

RANKS = [1, pytest.param(2, marks=pytest.mark.process)]
REAL_RANKS = [1, pytest.param(4, marks=pytest.mark.process)]
# Importing it would ask for TF_USE_LEGACY_KERAS, which the script sets.
needs_recommenders = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow_recommenders") is None,
    reason="tensorflow_recommenders is not installed",
)
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
LEGACY = "TF_USE_LEGACY_KERAS"
Run = Callable[..., str]
Find = Callable[[str], pathlib.Path]


def last(pattern: str, output: str) -> float:
    """The last number that `pattern` finds."""
    found = re.findall(pattern + r"\s*:?\s+([0-9.]+)", output)
    assert found, f"'{pattern}' not in\n{output}"
    return float(found[-1])


@pytest.mark.parametrize("ranks", RANKS)
def test_quickstart(run_example: Run, ranks: int) -> None:
    output = run_example("quickstart.py", ranks=ranks)
    losses = [float(x) for x in re.findall(r" loss: ([0-9.]+)", output)]
    assert losses[-1] < 0.6 < losses[0]


def test_async_nan(run_example: Run) -> None:
    output = run_example("async_nan.py", ranks=1)
    late, in_step, fast, watched = output.split("\nIn step")
    assert "not finite after" in late
    assert "not finite" not in in_step
    assert "not finite after" in fast
    before, after = watched.split("Not finite in step")
    warned = re.findall(r"Step (\d+): ads/max_norm is ", before)
    found = int(re.match(r" (\d+) ", after)[1])
    assert min(map(int, warned)) < found - 2, watched
    assert "Learning rate now 0.03." in after
    for trained in (in_step, after):
        first, last = re.findall(r"loss ([0-9.]+) -> ([0-9.]+)", trained)[0]
        assert float(last) < float(first), trained


@pytest.mark.process
def test_many_tables(run_example: Run, tmp_path: pathlib.Path) -> None:
    one = last("loss", run_example("many_tables.py", "--epochs", 1))
    plan = tmp_path / "plan.json"
    options = ("--prefetch-ids", "--plan", plan)
    for kind in ("row_wise", "auto"):  # The second time by the file.
        arguments = ("--epochs", 1, "--placement", kind, *options)
        several = run_example("many_tables.py", *arguments, ranks=2)
        assert last("loss", several) == pytest.approx(one, abs=2e-4)
        assert re.search("movies .*row_wise", several)
    assert plan.exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "arguments", "result", "good"),
    [
        ("libsvm_logistic.py", (), "test loss", ("test accuracy", 0.75, 1)),
        (
            *("sasrec.py", ("--epochs", 3), "loss: [0-9.]+ to"),
            ("among the first ten", 0.5, 1),
        ),
        pytest.param(
            *("movielens.py", ("--epochs", 8), "test RMSE"),
            ("test RMSE", 0, 0.85),
            marks=needs_recommenders,
        ),
    ],
    ids=["libsvm_logistic", "sasrec", "movielens"],
)
def test_without_files(
    run_example: Run,
    script: str,
    arguments: tuple[object, ...],
    result: str,
    good: tuple[str, float, float],
) -> None:
    """Learns what it should; ranks do not change the result."""
    outputs = [run_example(script, *arguments, ranks=r) for r in (1, 2)]
    one, several = (last(result, output) for output in outputs)
    assert several == pytest.approx(one, abs=2e-4)
    name, least, most = good
    assert least < last(name, outputs[0]) < most


@pytest.mark.process
def test_ctr_without_files(run_example: Run, tmp_path: pathlib.Path) -> None:
    """The same, with its report; batches do not divide the samples."""
    pytest.importorskip("matplotlib")
    losses = []
    for ranks in (1, 2):
        output = run_example(
            "ctr.py",
            *("--rows", 20_000, "--buckets", 2**14, "--batch-size", 300),
            *("--cross", "C6*C9", "--epochs", 2),
            *("--export", "served", "--table-dtype", "int8"),
            ranks=ranks,
        )
        served = last(r"served_auc \(int8\)", output)
        assert served == pytest.approx(last("val_auc", output), abs=1e-3)
        losses.append(last("val_loss", output))
        assert last("val_auc", output) > 0.7
        assert last("steps/s", output) > 0
        assert last(r"ranks", output) == ranks
        measured = last(r"this run \(measured\)", output)
        assert measured > 0 if ranks > 1 else measured == 0
        chart = tmp_path / "report.png"
        assert chart.stat().st_size > 0
        chart.unlink()
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


@needs_recommenders
def test_movielens_asks_for_tf_keras() -> None:
    """Before it imports TensorFlow, in whatever environment it starts."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "movielens.py"), "--help"],
        env={k: v for k, v in os.environ.items() if k != LEGACY},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_serve(run_example: Run) -> None:
    output = run_example(
        "serve.py",
        *("--rounds", 3, "--steps", 3, "--batch-size", 64, "--rows", 1000),
        *("--clients", 20, "--seconds", 1),
        ranks=2,
    )
    assert len(re.findall("20 clients: .* 0 errors", output)) == 2
    assert last("p50", output) < last("p99", output)
    assert "3 deltas, in use" in output
    assert 0 < last("staleness", output) < 60
    assert float(output.split("difference to predict(): ")[1].split()[0]) < 1e-6


@pytest.mark.process
def test_online(run_example: Run) -> None:
    output = run_example(
        "online.py",
        *("--steps", 200, "--batch-size", 64, "--rows", 1000),
        *("--publish", 0.2, "--save", 50, "--rate", 20_000),
        ranks=2,
    )
    assert int(re.findall(r"(\d+) deltas", output)[0]) > 1, output
    assert 0 < last("p50", output) <= last("max", output) < 60


def test_ctr_refuses_an_unknown_field(run_example: Run) -> None:
    with pytest.raises(AssertionError, match="--cross names no field: C99"):
        run_example("ctr.py", "--cross", "C1*C99")


@pytest.mark.parametrize("ranks", REAL_RANKS)
def test_a9a(run_example: Run, real_data: Find, ranks: int) -> None:
    folder = real_data("a9a")
    output = run_example(
        "libsvm_logistic.py",
        *("--train", folder / "a9a", "--test", folder / "a9a.t"),
        ranks=ranks,
    )
    assert last("test accuracy", output) >= 0.845


@pytest.mark.process
def test_raw_features(run_example: Run) -> None:
    pytest.importorskip("pyarrow")
    runs = {"csv": 1, "tfrecord": 2, "parquet": 2}
    results = [
        last("loss", run_example("raw_features.py", "--format", kind, ranks=n))
        for kind, n in runs.items()
    ]
    assert results == pytest.approx([results[0]] * 3, abs=2e-4)
    assert results[0] < 0.55


@needs_recommenders
@pytest.mark.parametrize("ranks", RANKS)
def test_ml_100k(run_example: Run, real_data: Find, ranks: int) -> None:
    folder = real_data("ml-100k")
    output = run_example("movielens.py", "--data", folder, ranks=ranks)
    assert last("test RMSE", output) <= 0.96


@pytest.mark.parametrize("ranks", REAL_RANKS)
def test_criteo_sample(run_example: Run, real_data: Find, ranks: int) -> None:
    pytest.importorskip("matplotlib")
    path = real_data("criteo") / "train_sample.txt"
    output = run_example(
        "ctr.py", "--data", path, "--batch-size", 100, ranks=ranks
    )
    assert 0 < last("val_loss", output) < 1
