# SPDX-License-Identifier: Apache-2.0
"""What the strategy decides before ranks meet."""

import json
import socket

import pytest

import tfdist_ext
from tfdist_ext.compression import TopK
from tfdist_ext.consistency import Accumulate
from tfdist_ext.strategy import bootstrap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_dtype": "float8"}, r"`gradient_dtype`.*'float8'"),
        ({"engine": "nccl"}, r"`engine`.*'tfdist', 'horovod'.*engine='?nccl"),
        ({"error_feedback": True}, r"`error_feedback`.*gradient_dtype="),
        ({"compression": 0.01}, r"`compression`.*TopK.*compression=0\.01"),
        (
            {"compression": TopK(0.1), "consistency": Accumulate(2)},
            r"`compression`.*each step.*TopK\(share=0\.1.*Accumulate",
        ),
        (
            {"compression": TopK(0.1), "gradient_dtype": "float16"},
            r"cannot be combined.*TopK\(share=0\.1.*'float16'",
        ),
        ({"balance": "fair"}, r"`balance`.*'equal', 'measured', 'ids'.*fair"),
        ({"balance": 3}, r"`balance`.*one share for each rank.*balance=3"),
        ({"balance": [None]}, r"`balance`.*share for each rank.*\[None\]"),
        ({"balance": [2, 1]}, r"2 shares and there are 1 ranks.*\[2, 1\]"),
        ({"balance": []}, r"0 shares and there are 1 ranks"),
        ({"balance": [-1.0]}, r"negative or not finite.*\[-1.0\]"),
        ({"balance": [float("nan")]}, r"not finite.*\[nan\]"),
        ({"balance": [float("inf")]}, r"not finite.*\[inf\]"),
        ({"balance": [0]}, r"no share above 0.*\[0\]"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_started(
    monkeypatch, arguments, message
):
    def connect(*_):
        pytest.fail("started")

    monkeypatch.setattr(bootstrap, "connect", connect)
    with pytest.raises(ValueError, match=message):
        tfdist_ext.HybridParallelStrategy(**arguments)


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        (["a:2222"], False),
        (["a:2222", "b:2222"], False),
        (["a:2222", "b:2222", "a:2223"], True),
        (["[::1]:2222", "[::2]:2222"], False),
        (["[::1]:2222", "[::1]:2223"], True),
    ],
)
def test_ranks_share_a_host_by_its_name(addresses, expected):
    assert bootstrap.share_a_host(addresses) == expected


@pytest.mark.parametrize("by_launcher", [False, True])
def test_ranks_that_other_hosts_reach_need_a_secret(monkeypatch, by_launcher):
    """Or the user's word that all may join."""
    monkeypatch.delenv("TFDIST_SECRET", raising=False)
    host = _address_of_this_host()
    config = {
        "cluster": {"worker": [f"{host}:7001", f"{host}:7002"]},
        "task": {"type": "worker", "index": 1},
    }
    if by_launcher:
        monkeypatch.delenv("TF_CONFIG", raising=False)
        given = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1}
        for name, value in {**given, "MASTER_ADDR": host}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(bootstrap, "take_share_of_host", lambda _: None)
    else:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    remedy = r"no secret.*Set TFDIST_SECRET.*allow_unauthenticated=True"
    with pytest.raises(ValueError, match=remedy):
        tfdist_ext.HybridParallelStrategy(startup_timeout=0.1)

    def check(address, secret, allow_unauthenticated):
        raise LookupError(f"{address} {secret} {allow_unauthenticated}")

    monkeypatch.setattr(bootstrap, "check_secret", check)
    monkeypatch.setenv("TFDIST_SECRET", "text")
    with pytest.raises(LookupError, match=f"{host}:.* b'text' True"):
        tfdist_ext.HybridParallelStrategy(allow_unauthenticated=True)


def test_a_secret_is_not_needed_on_loopback_or_if_the_user_says_so():
    bootstrap.check_secret("localhost:7000", b"", False)
    bootstrap.check_secret("192.0.2.1:7000", b"", True)
    bootstrap.check_secret("192.0.2.1:7000", b"secret", False)
    with pytest.raises(ValueError, match=r"start at 192\.0\.2\.1:7000"):
        bootstrap.check_secret("192.0.2.1:7000", b"", False)


def _address_of_this_host():
    """Another than of loopback; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no network")
        return probe.getsockname()[0]
