# SPDX-License-Identifier: Apache-2.0
"""Tables of every placement survive in files, bit for bit."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.process
OPTIMIZERS = ("row_wise", "own")


@pytest.fixture(scope="module")
def run(pools):
    """Runs a function of `tables_scenarios`."""

    def run(ranks, name, *arguments):
        pools.run(f"tables_scenarios.{name}", *arguments, ranks=ranks)

    return run


@pytest.fixture(scope="module", params=OPTIMIZERS)
def optimizer(request):
    """Whose slots are saved."""
    return request.param


@pytest.fixture(scope="module")
def saved(optimizer, run, tmp_path_factory):
    """A folder with a checkpoint of 4 ranks."""
    folder = tmp_path_factory.mktemp(optimizer)
    run(4, "save", folder, optimizer)
    assert not list(folder.glob("*_ranks")), "temporary files are left"
    return folder


@pytest.fixture(scope="module")
def files(saved, optimizer, run):
    """A folder with Keras files, written by 2 ranks."""
    run(2, "write_files", saved, optimizer)
    return saved


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


def test_tiny_tables_are_saved_where_rank_0_has_all(run, tmp_path, optimizer):
    run(4, "tiny", tmp_path, optimizer)


@pytest.mark.parametrize("count", [4, 2])
def test_tables_move_to_other_ranks(run, saved, optimizer, count):
    run(count, "moved", saved, optimizer)


@pytest.mark.parametrize("count", [2, 1])
def test_fewer_ranks_train_on(run, saved, optimizer, count):
    run(count, "restore", saved, optimizer)


@pytest.mark.parametrize("count", [2, 1])
def test_keras_files_are_read(run, files, optimizer, count):
    run(count, "read_files", files, optimizer)
