# SPDX-License-Identifier: Apache-2.0
"""Tables of every placement survive in files, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf
from launching import run_ranks

pytestmark = pytest.mark.process
PROGRAM = "tables_program.py"
OPTIMIZERS = ("row_wise", "own")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with checkpoints of 4 ranks.

    These ranks restore them too, with other placements ("moved"), and save a
    model of tiny tables alone ("tiny"): there only rank 0 has what to write.
    """
    folder = tmp_path_factory.mktemp("tables")
    run_ranks(PROGRAM, 4, folder, "save", "moved", "tiny")
    assert not list(folder.glob("*_ranks")), "temporary files are left"
    return folder


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_plain_tensorflow_reads_whole_tables_and_slots(saved, optimizer):
    noted = np.load(saved / f"{optimizer}.npz")
    reader = tf.train.load_checkpoint(str(saved / optimizer))
    names = reader.get_variable_to_shape_map()
    found = [
        tf.cast(reader.get_tensor(name), tf.float32).numpy()
        for name in names
        if reader.get_variable_to_dtype_map()[name].is_floating
    ]
    expected = {
        name: value
        for name, value in noted.items()
        if name.startswith("a/table")
        or (name.startswith("a/slot") and value.ndim)
    }
    assert len(expected) >= 2 * 8 + 2  # 8 tables, their slots, the dense ones
    for name, value in expected.items():
        assert any(np.array_equal(value, other) for other in found), name


def test_two_ranks_and_one_restore_what_four_saved(saved):
    files = ("write_files", "read_files")
    run_ranks(PROGRAM, 2, saved, "restore", "moved", *files)
    run_ranks(PROGRAM, 1, saved, "restore", "read_files")
