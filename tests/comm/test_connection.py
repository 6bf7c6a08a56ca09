# SPDX-License-Identifier: Apache-2.0
"""What a user may ask of the connections between ranks."""

import contextlib
import socket

import pytest

from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.connection import poll_busily

SO_BUSY_POLL = 46


@pytest.mark.parametrize(
    ("environment", "polled"),
    [({}, 0), ({"TFDIST_BUSY_POLL": "0"}, 0), ({"TFDIST_BUSY_POLL": "20"}, 20)],
    ids=str,
)
def test_the_system_polls_where_it_is_asked_to(environment, polled):
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(socket.socket()) for _ in range(2)]
        try:
            poll_busily([None, Connection(*ends)], environment)
        except ValueError as error:  # not with every right
            assert "TFDIST_BUSY_POLL=20: the system does not" in str(error)
            return
        found = [
            each.getsockopt(socket.SOL_SOCKET, SO_BUSY_POLL) for each in ends
        ]
    assert found == [polled, 0]  # messages only


@pytest.mark.parametrize("text", ["long", "-1", "1e3"])
def test_a_time_that_is_none_is_named(text):
    with pytest.raises(ValueError, match=f"Received: TFDIST_BUSY_POLL={text}"):
        poll_busily([], {"TFDIST_BUSY_POLL": text})
