# SPDX-License-Identifier: Apache-2.0
"""Tables on the ranks' devices and on their hosts."""

import pathlib

import pytest

pytestmark = pytest.mark.process
PROGRAM = pathlib.Path(__file__).with_name("storage_program.py")


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (1, 3)])
def test_tables_lie_where_they_should_and_learn_the_same(
    run_ranks, tmp_path, ranks, keras
):
    run_ranks(PROGRAM, ranks, tmp_path, keras=keras, timeout=300)
    assert len(list(tmp_path.glob("done.*"))) == ranks
