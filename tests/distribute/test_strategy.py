# SPDX-License-Identifier: Apache-2.0
"""What the strategy decides before ranks meet."""

import pytest

import tfdist_ext
from tfdist_ext.distribute import bootstrap


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradient_dtype": "float8"}, r"`gradient_dtype`.*'float8'"),
        ({"engine": "nccl"}, r"`engine`.*'tfdist', 'horovod'.*engine='?nccl"),
        ({"error_feedback": True}, r"`error_feedback`.*gradient_dtype="),
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
