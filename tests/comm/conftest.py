# SPDX-License-Identifier: Apache-2.0
"""Ports for rendezvous tests."""

import socket
from collections.abc import Callable

import pytest


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def free_port() -> Callable[[], int]:
    """A function that finds a port nobody listens on."""
    return _free_port
