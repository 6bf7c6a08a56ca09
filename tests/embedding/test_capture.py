# SPDX-License-Identifier: Apache-2.0
"""A capture that fails: its reason, and what the call returns then."""

import contextlib

from tfdist_ext.embedding import capture


class Collectives:
    @contextlib.contextmanager
    def capturing(self, graph):
        yield


def test_a_failed_capture_gives_its_reason():
    calls, forgotten, reasons = [], [], []

    def call():
        calls.append(capture.is_active())
        if capture.is_active():
            raise ValueError("why")
        return "result"

    result = capture.shared(
        call, Collectives(), None, forgotten.append, reasons.append
    )
    assert result == "result"
    assert calls == [True, False]
    assert len(forgotten) == 1
    assert reasons == ["ValueError: why"]
