# SPDX-License-Identifier: Apache-2.0
"""Paths that differ from rank to rank, and files that are there already."""

import pathlib

import pytest

pytestmark = pytest.mark.process
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("keras", [3, 2])
def test_tutorials_of_tensorflow_run_as_they_are(run_ranks, tmp_path, keras):
    run_ranks(HERE / "tutorial_program.py", 2, tmp_path, keras=keras)


@pytest.mark.parametrize("keras", [3, 2])
def test_only_models_of_several_ranks_ask_nobody(run_ranks, tmp_path, keras):
    run_ranks(HERE / "asking_program.py", 2, tmp_path, keras=keras)
