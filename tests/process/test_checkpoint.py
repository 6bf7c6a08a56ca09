# SPDX-License-Identifier: Apache-2.0
"""State survives in one checkpoint, whatever the ranks and placements."""

import pathlib

import numpy as np
import pytest
import scenarios
import tensorflow as tf

from tfdist_ext.saving.checkpoint_index import Index

pytestmark = pytest.mark.process

HERE = pathlib.Path(__file__).parent
TABLE = [53, 6]
# What is saved: number of ranks, name, placement, format.
SAVED = {
    3: [
        (2, "two", "row", "checkpoint"),
        (2, "two_weights", "column", "weights"),
        (2, "two_keras", "row", "keras"),
        (4, "four_columns", "column", "checkpoint"),
        (4, "four_rows", "row", "checkpoint"),
        (1, "one", "row", "checkpoint"),
        (2, "two_pieces", "row", "pieces"),
        (4, "four_pieces", "column", "pieces"),
        (4, "grid_pieces", "grid", "pieces"),
    ],
    2: [
        (2, "two", "row", "checkpoint"),
        (2, "two_pieces", "row", "pieces"),
        (2, "two_weights", "column", "weights"),
    ],
}
# The same of what is restored, with the Keras in front.
RESTORED = [
    (3, 4, "two", "column", "checkpoint"),
    (3, 1, "two_weights", "row", "weights"),
    (3, 2, "four_columns", "row", "checkpoint"),
    (3, 2, "one", "row", "checkpoint"),
    (3, 2, "two_keras", "row", "keras"),
    (2, 2, "two_weights", "row", "weights"),
    (2, 1, "two", "row", "checkpoint"),
    (3, 2, "two_pieces", "row", "same_pieces"),
    (3, 4, "two_pieces", "grid", "pieces"),
    (3, 4, "grid_pieces", "grid", "same_pieces"),
    (3, 4, "grid_pieces", "column", "pieces"),
    (3, 2, "four_pieces", "row", "pieces"),
    (3, 4, "four_pieces", "column", "same_pieces"),
    (3, 2, "grid_pieces", "column", "checkpoint"),
    (3, 2, "one", "row", "pieces"),
    (2, 2, "two_pieces", "column", "pieces"),
]


@pytest.fixture(scope="module", params=[3, 2], ids=["keras3", "tf_keras"])
def saved(request, pools, tmp_path_factory):
    """The Keras, and a folder of what was saved with it."""
    keras = request.param
    folder = tmp_path_factory.mktemp(f"keras{keras}")
    for ranks, name, *how in SAVED[keras]:
        scenario = "checkpoint_scenarios.save"
        pools.run(scenario, folder / name, *how, ranks=ranks, keras=keras)
    return keras, folder


@pytest.mark.parametrize(
    ("saved", "count", "name", "placement", "form"),
    RESTORED,
    ids=["-".join(map(str, case)) for case in RESTORED],
    indirect=["saved"],
)
def test_saved_here_restored_there(saved, pools, count, name, placement, form):
    keras, folder = saved
    scenario, path = "checkpoint_scenarios.restore", folder / name
    pools.run(scenario, path, placement, form, ranks=count, keras=keras)


def test_no_temporary_files_are_left(saved):
    assert not list(saved[1].glob("*_ranks"))


def test_plain_tensorflow_reads_one_table(saved):
    for path in saved[1].glob("*.index"):
        noted = np.load(path.with_suffix(".npz"))
        expected = [v for k, v in noted.items() if k.startswith("a/")]
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        shapes = reader.get_variable_to_shape_map()
        found = [reader.get_tensor(n) for n, s in shapes.items() if s == TABLE]
        tables = [value for value in expected if list(value.shape) == TABLE]
        assert len(tables) == 2  # the table and its Adagrad slot
        for table in tables:
            assert any(np.array_equal(table, value) for value in found)


def test_pieces_are_small(saved):
    found = 0
    for path in saved[1].glob("*_pieces.index"):
        index = Index(str(path.with_suffix("")))
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        for name, shape in reader.get_variable_to_shape_map().items():
            assert index.shape(name) == tuple(shape)
            if shape == TABLE:
                assert index.most_bytes(name) < 4 * 53 * 6 / 4
                found += 1
    assert found >= 2


@pytest.mark.parametrize("point", ["part", "index"])
def test_a_rank_that_dies_while_saving_leaves_the_last_checkpoint(
    run_ranks, tmp_path, point
):
    run_ranks(HERE / "crash_while_saving.py", 2, tmp_path, point)
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
    keys, counts = (
        reader.get_tensor(name)
        for what in ("keys", "counts")
        for name in reader.get_variable_to_shape_map()
        if name.endswith(f"/{what}")
    )
    # Those of the first step, none that came later.
    assert keys[counts > 0, 0].tolist() == list(range(100, 120))


EVERY = scenarios.of("saving_scenarios", "saving_failures_scenarios")
KERAS_3 = scenarios.without(EVERY, {"metrics", "callbacks"})


@pytest.mark.parametrize(
    ("ranks", "keras", "scenario"),
    [(2, 3, s) for s in KERAS_3] + [(2, 2, s) for s in EVERY],
)
def test_ways_to_save(run_scenario, ranks, keras, scenario):
    run_scenario(scenario, ranks=ranks, keras=keras)
