# SPDX-License-Identifier: Apache-2.0
"""A capture that fails: its reason, and what the call returns then."""

import contextlib
import logging

from tfdist_ext.embedding import capture


class Collectives:
    @contextlib.contextmanager
    def capturing(self, graph):
        yield


def test_the_reason_of_a_failed_capture_is_logged(caplog):
    calls, forgotten = [], []

    def call():
        calls.append(capture.is_active())
        if capture.is_active():
            raise ValueError("why")
        return "result"

    with caplog.at_level(logging.DEBUG, "tfdist_ext"):
        result = capture.shared(call, Collectives(), None, forgotten.append)
    assert result == "result"
    assert calls == [True, False]
    assert len(forgotten) == 1
    assert "share no exchange: ValueError: why" in caplog.text
