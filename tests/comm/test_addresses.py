# SPDX-License-Identifier: Apache-2.0
"""Addresses of ranks: what they bind, and who reaches it."""

import pytest

from tfdist_ext.comm import addresses
from tfdist_ext.comm.addresses import bind_address


def test_bind_address():
    assert bind_address("127.0.0.1:80") == "127.0.0.1"
    assert bind_address("localhost:80") == "127.0.0.1"
    with pytest.raises(ValueError, match="all interfaces"):
        bind_address("0.0.0.0:80")
    with pytest.raises(ValueError, match=r"no-such-host\.invalid"):
        bind_address("no-such-host.invalid:80")


def test_split():
    assert addresses.split("a.b:80") == ("a.b", 80)
    assert addresses.split("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize(
    ("numeric", "expected"),
    [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)],
)
def test_is_loopback(numeric, expected):
    assert addresses.is_loopback(numeric) == expected
