# SPDX-License-Identifier: Apache-2.0
"""State survives in one checkpoint, whatever the ranks and placements."""

import numpy as np
import pytest
import tensorflow as tf
from launching import run_ranks

pytestmark = pytest.mark.process


@pytest.mark.parametrize(
    ("keras", "form", "saved", "restored"),
    [
        (3, "checkpoint", (2, "row"), (4, "column")),
        (3, "checkpoint", (4, "column"), (2, "row")),
        (3, "checkpoint", (1, "row"), (2, "row")),
        (3, "weights", (2, "column"), (1, "row")),
        (3, "keras", (2, "row"), (2, "row")),
        (2, "checkpoint", (2, "row"), (1, "row")),
        (2, "weights", (2, "column"), (2, "row")),
    ],
)
def test_saved_here_restored_there(tmp_path, keras, form, saved, restored):
    for action, (ranks, placement) in (("save", saved), ("restore", restored)):
        run_ranks(
            "checkpoint_program.py",
            ranks,
            action,
            tmp_path,
            placement,
            form,
            keras=keras,
        )
    assert not list(tmp_path.glob("*_ranks")), "temporary files are left"


def test_plain_tensorflow_reads_one_table(tmp_path):
    run_ranks("checkpoint_program.py", 4, "save", tmp_path, "row", "checkpoint")
    noted = np.load(tmp_path / "noted.npz")
    tables = {
        name: values for name, values in noted.items() if name.startswith("a/")
    }
    reader = tf.train.load_checkpoint(str(tmp_path / "saved"))
    shapes = reader.get_variable_to_shape_map()
    found = [
        reader.get_tensor(name)
        for name, shape in shapes.items()
        if shape == [53, 6]
    ]
    expected = [v for v in tables.values() if v.shape == (53, 6)]
    assert len(expected) == 2  # the table and its Adagrad slot
    for table in expected:
        assert any(np.array_equal(table, value) for value in found)


def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(tmp_path):
    run_ranks("crash_while_saving.py", 2, tmp_path)
    latest = tf.train.latest_checkpoint(str(tmp_path / "checkpoints"))
    assert latest.endswith("ckpt-1")
    reader = tf.train.load_checkpoint(latest)
    tables = [
        reader.get_tensor(name)
        for name, shape in reader.get_variable_to_shape_map().items()
        if shape == [53, 6]
    ]
    kernel = np.load(tmp_path / "kernel.npy")
    assert any(np.array_equal(table, kernel) for table in tables)
