# SPDX-License-Identifier: Apache-2.0
"""Ranks meet, however many, or say who is missing and what to do."""

import json
import os
import socket
import threading
import time

import pytest

from tfdist_ext.comm import connector
from tfdist_ext.comm import ranks
from tfdist_ext.comm.handshake import Job
from tfdist_ext.comm.handshake import Link
from tfdist_ext.comm.listener import Listener

LIMIT = 60.0
SECRET = b"0123456789abcdef" * 2


def meet_all(calls):
    """Results, or errors, of several calls of `exchange_bytes` at once."""
    outcomes = [None] * len(calls)

    def call(place, rank, addresses, timeout, secret):
        try:
            outcomes[place] = ranks.exchange_bytes(
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
        ranks.exchange_bytes(
            1, addresses, b"", secret=b"", timeout=0.5, patience=0.1
        )
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
    assert "rank 1 (127.0.0.1:1) of 3 ranks did not connect" in first
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
    assert "rank 1 (127.0.0.1:1) connected and failed" in outcome[0]
    assert answer == {"error": outcome[0]}, json.dumps(answer)


def start(rank, addresses, outcomes, blob=None, timeout=LIMIT, secret=SECRET):
    """Lets a rank meet the others in a thread."""

    def run():
        try:
            outcomes[rank] = ranks.exchange_bytes(
                rank,
                addresses,
                blob or b"blob %d" % rank,
                secret=secret,
                timeout=timeout,
                patience=0.5,
            )
        except RuntimeError as error:
            outcomes[rank] = str(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def come_and_end(addresses, rank, blob):
    """A process of a rank that dies after it has sent its bytes."""
    salt = " ".join(addresses)
    job = Job(f"ranks {salt}", SECRET, salt)
    where = ("127.0.0.1", int(addresses[0].rpartition(":")[2]))
    until = time.monotonic() + LIMIT
    link = Link(connector.connect(where, job, rank, until), "rank 0")
    link.send({"blob": blob.hex()}, LIMIT)
    link.close()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_rank_that_starts_again_replaces_its_dead_process(
    is_last, free_port, monkeypatch
):
    """The others go on with the address of the new one."""
    addresses, outcomes = addresses_of(3, free_port()), {}
    receive = Link.receive

    def receive_slowly(link, timeout):
        message = receive(link, timeout)
        if message == {"blob": b"dead".hex()}:
            time.sleep(0.2)  # rank 0 sees its end after its bytes
        return message

    monkeypatch.setattr(Link, "receive", receive_slowly)
    threads = [start(0, addresses, outcomes)]
    if is_last:
        threads.append(start(2, addresses, outcomes))
        time.sleep(0.3)
    come_and_end(addresses, 1, b"dead")
    threads.append(start(1, addresses, outcomes))
    if not is_last:
        time.sleep(0.2)
        threads.append(start(2, addresses, outcomes))
    for thread in threads:
        thread.join(LIMIT)
    expected = [b"blob 0", b"blob 1", b"blob 2"]
    assert outcomes == dict.fromkeys(range(3), expected)


def test_rank_0_starts_again_while_the_others_wait(free_port, caplog):
    addresses, outcomes = addresses_of(3, free_port()), {}
    threads = [start(rank, addresses, outcomes) for rank in (1, 2)]
    salt = " ".join(addresses)
    where = ("127.0.0.1", int(addresses[0].rpartition(":")[2]))
    with Listener(where, [1, 2, 3]) as dead:  # ends before rank 3 comes
        until = time.monotonic() + LIMIT
        came = dead.accept(Job(f"ranks {salt}", SECRET, salt), until)
        for connection in [next(came)[1], next(came)[1]]:
            connection.close()
    threads.append(start(0, addresses, outcomes))
    for thread in threads:
        thread.join(LIMIT)
    expected = [b"blob 0", b"blob 1", b"blob 2"]
    assert outcomes == dict.fromkeys(range(3), expected)
    assert f"rank 0 ({addresses[0]}) ended before all" in caplog.text


def test_a_rank_that_ends_for_good_is_named(free_port):
    addresses, outcomes = addresses_of(3, free_port()), {}
    thread = start(0, addresses, outcomes, timeout=3.0)
    come_and_end(addresses, 1, b"dead")
    thread.join(LIMIT)
    assert "rank 1 (127.0.0.1:1), rank 2 (127.0.0.1:2) of 3" in outcomes[0]
    assert "(it connected and ended)" in outcomes[0]


def test_a_name_that_cannot_be_resolved_is_told_soon(
    free_port, caplog, monkeypatch
):
    """By rank 0, which waits, and by the others, which try; both go on."""
    monkeypatch.setattr(connector, "REPORT_SECONDS", 0.2)
    addresses = addresses_of(2, free_port())
    addresses[1] = "no-such-host.invalid:7"
    outcomes = {}
    start(0, addresses, outcomes, timeout=1.0).join(LIMIT)
    assert (
        f"rank 0 has waited 0.2 s at {addresses[0]} for rank 1 "
        "(no-such-host.invalid:7) of 2 ranks. It goes on for "
        "startup_timeout=1 s. no-such-host.invalid cannot be resolved here: "
    ) in caplog.text
    assert "did not connect" in outcomes[0]
    caplog.clear()
    others = list(reversed(addresses))
    start(1, others, outcomes, timeout=1.0).join(LIMIT)
    assert len(caplog.records) == 1
    assert (
        f"rank 1 ({others[1]}) has not reached rank 0 "
        "(no-such-host.invalid:7) for 0.2 s: [Errno -"
    ) in caplog.text
    assert "cannot reach rank 0" in outcomes[1]


def test_a_job_without_a_secret_refuses_other_users(free_port, monkeypatch):
    """Neither do ranks join another user's job, nor these theirs."""
    addresses, outcomes = addresses_of(2, free_port()), {}
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    threads = [
        start(0, addresses, outcomes, timeout=4.0, secret=b""),
        start(1, addresses, outcomes, timeout=4.0, secret=b""),
    ]
    for thread in threads:
        thread.join(LIMIT)
    assert outcomes[0].count(f"of user {user} (another user)") == 1
    assert f"of user {user} listens there" in outcomes[1]


def test_a_job_without_a_secret_cannot_be_joined_by_tcp(free_port):
    addresses, outcomes = addresses_of(2, free_port()), {}
    thread = start(0, addresses, outcomes, secret=b"")
    where = ("127.0.0.1", int(addresses[0].rpartition(":")[2]))
    time.sleep(0.2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where).close()
    start(1, addresses, outcomes, secret=b"").join(LIMIT)
    thread.join(LIMIT)
    assert outcomes == {rank: [b"blob 0", b"blob 1"] for rank in range(2)}


def test_other_users_are_accepted_where_the_user_says_so(
    free_port, monkeypatch
):
    addresses, outcomes = addresses_of(2, free_port()), []
    monkeypatch.setattr(os, "geteuid", lambda: 12345)

    def run(rank):
        outcomes.append(
            ranks.exchange_bytes(
                rank,
                addresses,
                b"b",
                secret=b"",
                timeout=LIMIT,
                allow_unauthenticated=True,
            )
        )

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert outcomes == [[b"b", b"b"]] * 2
