# SPDX-License-Identifier: Apache-2.0
"""Safetensors files of models, written and read at different ranks."""

import json
import pathlib

import numpy as np
import pytest

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("ranks", "keras", "reading"),
    [
        (2, 3, 1),
        (2, 3, 2),
        (1, 3, 2),
        (2, 2, 2),
        (4, 3, 2),
        pytest.param(2, 3, 4, marks=pytest.mark.extended),
    ],
)
def test_written_here_read_there(pools, tmp_path, ranks, keras, reading):
    """Under other placements, with keys and every dtype of tables."""
    expected, *others = pools.run(
        "safetensors_scenarios.write", tmp_path, ranks=ranks, keras=keras
    )
    assert len(others) == ranks - 1
    names = [
        f"model-{i + 1:05}-of-{ranks:05}.safetensors" for i in range(ranks)
    ]
    index = "model.safetensors.index.json"
    assert sorted(p.name for p in tmp_path.iterdir()) == [*names, index]
    scenario = "safetensors_scenarios.read"
    pools.run(scenario, tmp_path, expected, ranks=reading, keras=keras)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_the_library_of_the_format_reads_it(pools, tmp_path, ranks, keras):
    numpy = pytest.importorskip(
        "safetensors.numpy", reason="needs pip install safetensors"
    )
    safetensors = pytest.importorskip("safetensors")
    pytest.importorskip("ml_dtypes")  # gives NumPy bfloat16
    expected, _ = pools.run(
        "safetensors_scenarios.write", tmp_path, ranks=ranks, keras=keras
    )
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    places = index["weight_map"]
    parts = {name for name in places if name.startswith("embedding/rows.rows.")}
    assert parts == {"embedding/rows.rows.0", "embedding/rows.rows.28"}
    assert len({places[name] for name in parts}) == 2
    assert index["metadata"]["tables"]["embedding/rows"] == [53, 6]
    loaded = {}
    for path in sorted(pathlib.Path(tmp_path).glob("*.safetensors")):
        with safetensors.safe_open(path, "numpy") as file:
            assert {n for n, p in places.items() if p == path.name} == set(
                file.keys()
            )
        mine = numpy.load_file(path)
        loaded.update(mine)
    assert index["metadata"]["total_size"] == sum(
        each.nbytes for each in loaded.values()
    )
    for name in ("rows", "columns", "one", "ids", "words"):
        table = f"embedding/{name}"
        rows = [
            (int(key.rsplit(".", 1)[1]), value)
            for key, value in loaded.items()
            if key.startswith(f"{table}.rows.")
        ]
        whole = [value for _, value in sorted(rows, key=lambda pair: pair[0])]
        found = np.concatenate(whole)
        assert found.dtype == ("bfloat16" if name == "columns" else "float32")
        np.testing.assert_array_equal(
            np.asarray(found, np.float32), expected[table], name
        )
    for name in ("ids", "words"):
        keys, rows = (
            loaded[f"embedding/{name}.{w}"] for w in ("keys", "key_rows")
        )
        np.testing.assert_array_equal(keys, expected[f"{name} keys"])
        np.testing.assert_array_equal(rows, expected[f"{name} rows"])
    np.testing.assert_array_equal(loaded["top/kernel"], expected["top/kernel"])


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2)])
def test_an_error_of_one_rank_loses_nothing(run_scenario, ranks, keras):
    run_scenario(
        "safetensors_scenarios.one_rank_fails", ranks=ranks, keras=keras
    )
