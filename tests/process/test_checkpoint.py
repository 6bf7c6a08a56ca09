# SPDX-License-Identifier: Apache-2.0
"""State survives in one checkpoint, whatever the ranks and placements."""

import numpy as np
import pytest
import tensorflow as tf
from launching import run_ranks

pytestmark = pytest.mark.process


TABLE = [53, 6]
PROGRAM = "checkpoint_program.py"
# Starts of ranks, in order: what is saved by one is restored by others.
STARTS = {
    3: [
        (
            2,
            "save:two:row:checkpoint",
            "save:two_weights:column:weights",
            "save:two_keras:row:keras",
        ),
        (
            4,
            "restore:two:column:checkpoint",
            "save:four_columns:column:checkpoint",
            "save:four_rows:row:checkpoint",
        ),
        (1, "save:one:row:checkpoint", "restore:two_weights:row:weights"),
        (
            2,
            "restore:four_columns:row:checkpoint",
            "restore:one:row:checkpoint",
            "restore:two_keras:row:keras",
        ),
    ],
    2: [
        (
            2,
            "save:two:row:checkpoint",
            "save:two_weights:column:weights",
            "restore:two_weights:row:weights",
        ),
        (1, "restore:two:row:checkpoint"),
    ],
}


@pytest.fixture(scope="module", params=[3, 2], ids=["keras3", "tf_keras"])
def saved(request, tmp_path_factory):
    """A folder of what was saved here and restored there."""
    folder = tmp_path_factory.mktemp(f"keras{request.param}")
    for ranks, *actions in STARTS[request.param]:
        run_ranks(PROGRAM, ranks, folder, *actions, keras=request.param)
    return folder


def test_no_temporary_files_are_left(saved):
    assert not list(saved.glob("*_ranks"))


def test_plain_tensorflow_reads_one_table(saved):
    checkpoints = sorted(saved.glob("*.index"))
    for path in checkpoints:
        noted = np.load(path.with_suffix(".npz"))
        expected = [v for k, v in noted.items() if k.startswith("a/")]
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        shapes = reader.get_variable_to_shape_map()
        found = [reader.get_tensor(n) for n, s in shapes.items() if s == TABLE]
        tables = [value for value in expected if list(value.shape) == TABLE]
        assert len(tables) == 2  # the table and its Adagrad slot
        for table in tables:
            assert any(np.array_equal(table, value) for value in found)


@pytest.mark.parametrize("point", ["part", "index"])
def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(
    tmp_path, point
):
    run_ranks("crash_while_saving.py", 2, tmp_path, point)
    latest = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
    assert latest.endswith("ckpt-1")
    reader = tf.train.load_checkpoint(latest)
    tables = [
        reader.get_tensor(name)
        for name, shape in reader.get_variable_to_shape_map().items()
        if shape == TABLE
    ]
    kernel = np.load(tmp_path / "kernel.npy")
    assert any(np.array_equal(table, kernel) for table in tables)


SAVING = [
    "documented",
    "sums",
    "path_of_rank_0",
    "options",
    "one_path",
    "manager",
    "refusals",
    "iterators",
    "write_fails",
    "read_fails",
]


@pytest.mark.parametrize(
    ("keras", "scenarios"),
    [(3, SAVING), (2, [*SAVING, "metrics", "callbacks"])],
    ids=["keras3", "tf_keras"],
)
def test_ways_to_save(tmp_path, keras, scenarios):
    run_ranks("saving_program.py", 2, tmp_path, *scenarios, keras=keras)
    for name in scenarios:
        assert all((tmp_path / f"{name}.{rank}").exists() for rank in (0, 1))
