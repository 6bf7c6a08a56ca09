# SPDX-License-Identifier: Apache-2.0
"""Vocabularies that grow: ranks train, and restore, what one process does."""

import pathlib

import pytest

pytestmark = pytest.mark.process
HERE = pathlib.Path(__file__).parent
MODULE = "vocabulary_cases"


@pytest.mark.parametrize(
    ("ranks", "keras", "case"),
    [(2, 3, "adam"), (4, 3, "adam"), (2, 2, "own")],
)
def test_ranks_train_what_one_process_trains(one_process, ranks, keras, case):
    one_process.check(MODULE, case, ranks, keras)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    """A folder with a checkpoint of 2 ranks."""
    folder = tmp_path_factory.mktemp("vocabularies")
    pools.run(f"{MODULE}.save", folder, "adam", ranks=2)
    return folder


@pytest.mark.parametrize(
    ("ranks", "more", "size"),
    [(4, 0, 512), (1, 0, 512), (2, 0, 512), (2, 35, 512), (2, 35, 2**24)],
)
def test_keys_rows_and_slots_are_restored(pools, saved, ranks, more, size):
    pools.run(f"{MODULE}.restore", saved, "adam", more, size, ranks=ranks)


def test_a_rank_that_dies_in_a_step_takes_nothing_that_was_saved(
    run_ranks, pools, saved, tmp_path
):
    run_ranks(HERE / "crash_while_growing.py", 2, saved, tmp_path)
    pools.run(f"{MODULE}.go_on", saved, tmp_path, ranks=2)
