# SPDX-License-Identifier: Apache-2.0
"""Ranks meet, however many, or say who is missing and what to do."""

import json
import socket
import threading
import time

import pytest

from tfdist_ext.rendezvous import connector
from tfdist_ext.rendezvous import ranks
from tfdist_ext.rendezvous.handshake import Job
from tfdist_ext.rendezvous.link import Link

LIMIT = 60.0
SECRET = b"0123456789abcdef" * 2


def meet_all(calls):
    """Results, or errors, of several calls of `meet` at once."""
    outcomes = [None] * len(calls)

    def call(place, rank, addresses, timeout, secret):
        try:
            outcomes[place] = ranks.meet(
                rank,
                addresses,
                b"blob %d" % rank,
                secret=secret,
                timeout=timeout,
            )
        except RuntimeError as error:
            outcomes[place] = str(error)

    threads = [
        threading.Thread(target=call, args=(place, *each), daemon=True)
        for place, each in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
        time.sleep(0.001)
    for thread in threads:
        thread.join(LIMIT)
    return outcomes


def addresses_of(count, port):
    return [f"127.0.0.1:{port}"] + [
        f"127.0.0.1:{each}" for each in range(1, count)
    ]


@pytest.mark.parametrize("count", [2, 3, 11, 120])
def test_blobs_come_in_rank_order(count, free_port):
    addresses = addresses_of(count, free_port())
    calls = [
        (rank, addresses, LIMIT, SECRET) for rank in reversed(range(count))
    ]
    expected = [b"blob %d" % rank for rank in range(count)]
    assert meet_all(calls) == [expected] * count


def test_all_learn_who_is_missing(free_port):
    addresses = addresses_of(4, free_port())
    calls = [(rank, addresses, 1.0, b"") for rank in (0, 2)]
    first, second = meet_all(calls)
    missing = "rank 1 (127.0.0.1:1), rank 3 (127.0.0.1:3) of 4 ranks"
    assert missing in first and "startup_timeout=1 s" in first
    own = f"rank 2 ({addresses[2]})"
    assert f"{own}: rank 0 ({addresses[0]}) says: {first}" == second


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("127.0.0.1", "Connection refused"),
        ("no-such-host.invalid", "[Errno -"),  # in words of the resolver
    ],
)
def test_rank_0_is_out_of_reach(free_port, host, why):
    addresses = [f"{host}:{free_port()}", "127.0.0.1:1"]
    with pytest.raises(RuntimeError) as raised:
        ranks.meet(1, addresses, b"", secret=b"", timeout=0.5, patience=0.1)
    error = str(raised.value)
    assert f"cannot reach rank 0 ({addresses[0]}) within" in error
    assert "startup_timeout=0.5 s" in error and why in error


def test_a_taken_port_names_the_address(free_port):
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        (error,) = meet_all([(0, addresses_of(2, port), 1.0, b"s")])
    assert f"cannot listen at its address '127.0.0.1:{port}'" in error


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"secret": b"guess"}, "Set the same TFDIST_SECRET"),
        ({"rank": 2}, "Give every process its own task index"),
        (
            {"addresses": ["127.0.0.1:9"]},
            "its TF_CONFIG or launcher names other",
        ),
    ],
)
def test_who_is_refused_learns_what_to_do(
    change, remedy, free_port, monkeypatch
):
    """And rank 0, in the end, whom it has refused."""
    monkeypatch.setattr(connector, "TAKEN_SECONDS", 0.2)
    addresses = addresses_of(3, free_port())
    other = addresses + change.get("addresses", [])
    good = [(0, addresses, 2.0, b"s"), (2, addresses, 2.0, b"s")]
    bad = (change.get("rank", 1), other, 2.0, change.get("secret", b"s"))
    first, second, refused = meet_all([*good, bad])
    assert remedy in refused or remedy in second
    assert "rank 1 (127.0.0.1:1) of 3 ranks did not come" in first
    assert "Refused: 127.0.0.1:" in first


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 500_000,
        b'{"blob": Infinity}',
        b'{"blob": "xyz"}',
        b'{"blob": ["61"]}',
        b"[]",
        b"\xff\xfe",
        b"{}",
    ],
    ids=lambda line: line[:12].decode(errors="replace"),
)
def test_a_rank_that_sends_nonsense_is_named(line, free_port):
    """It knows the secret; nothing crashes all the same."""
    addresses = addresses_of(2, free_port())
    outcome = []

    def rank_0():
        outcome.extend(meet_all([(0, addresses, LIMIT, b"s")]))

    thread = threading.Thread(target=rank_0, daemon=True)
    thread.start()
    salt = " ".join(addresses)
    job = Job(f"ranks {salt}", b"s", salt)
    port = int(addresses[0].rpartition(":")[2])
    connection = connector.connect(
        ("127.0.0.1", port), job, 1, time.monotonic() + LIMIT
    )
    connection.sendall(line + b"\n")
    link = Link(connection, "rank 0")
    answer = link.receive(LIMIT)
    link.close()
    thread.join(LIMIT)
    assert "rank 1 (127.0.0.1:1) has come and failed" in outcome[0]
    assert answer == {"error": outcome[0]}, json.dumps(answer)
