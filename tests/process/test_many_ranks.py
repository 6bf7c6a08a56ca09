# SPDX-License-Identifier: Apache-2.0
"""More ranks than ten, whose names do not sort as their numbers do."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process


def test_eleven_and_sixteen_ranks_train_as_one_process_does(tmp_path):
    run_ranks("many_ranks_program.py", 1, tmp_path, timeout=400)
