# SPDX-License-Identifier: Apache-2.0
"""Ranks start, also more of them than ten, or say why they do not."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process


def test_ranks_start_and_train_as_one_process_does(tmp_path):
    run_ranks("start_program.py", 1, tmp_path)
