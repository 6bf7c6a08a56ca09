# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests with several ranks."""

import pytest
from comparing import OneProcess


@pytest.fixture(scope="session")
def one_process(pools):
    """What one process trains."""
    return OneProcess(pools)
