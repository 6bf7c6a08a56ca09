# SPDX-License-Identifier: Apache-2.0
"""Horovod that cannot be loaded: every rank says so, early or late."""

import sys
import time

import pytest

from tests.thread_ranks import run_on_ranks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.strategy import bootstrap


def test_who_comes_late_meets_its_own_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod", None)

    def program(group):
        collectives = Collectives(group)
        while group.rank and not group.left()[0]:
            time.sleep(0.01)  # until rank 0 has given up
        with pytest.raises(ImportError, match="engine='horovod' needs"):
            bootstrap.start_horovod(collectives)
        collectives.barrier("all are in step")

    run_on_ranks(3, program)
