# SPDX-License-Identifier: Apache-2.0
"""Ranks start, also more of them than ten, or say why they do not."""

import pathlib

import pytest

pytestmark = pytest.mark.process


PROGRAM = pathlib.Path(__file__).with_name("start_program.py")


def test_ranks_start_and_train_as_one_process_does(run_ranks, tmp_path):
    run_ranks(PROGRAM, 1, tmp_path)
