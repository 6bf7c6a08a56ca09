# SPDX-License-Identifier: Apache-2.0
"""Strategies come and go in a process; TensorFlow's handlers are served."""

import pathlib

import pytest

pytestmark = pytest.mark.process
HERE = pathlib.Path(__file__).parent


def test_several_strategies_in_one_process(run_ranks):
    run_ranks(HERE / "lives_program.py", 3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_save_where_one_is_preempted(run_ranks, tmp_path, ranks):
    run_ranks(HERE / "preemption_program.py", ranks, tmp_path)
