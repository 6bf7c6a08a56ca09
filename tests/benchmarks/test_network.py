# SPDX-License-Identifier: Apache-2.0
"""Namespaces are limited, counted, and removed on every way out."""

import subprocess
import sys

import pytest

from benchmarks import network

_REASON = network.reason_unavailable()
needs_namespaces = pytest.mark.skipif(bool(_REASON), reason=_REASON)

_COUNTERS = """\
Inter-|   Receive                          |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes ...
    lo:       7       0    0    0    0     0          0         0        7 0
  eth0: 123456       5    0    0    0     0          0         0      789 1 0
"""


def test_read_traffic_finds_the_interface(tmp_path):
    table = tmp_path / "dev"
    table.write_text(_COUNTERS)
    traffic = network.read_traffic("eth0", table)
    assert traffic == network.Traffic(egress=789, ingress=123456)


def test_read_traffic_names_a_missing_interface(tmp_path):
    table = tmp_path / "dev"
    table.write_text(_COUNTERS)
    with pytest.raises(ValueError, match="'eth1'"):
        network.read_traffic("eth1", table)


def test_traffic_is_a_difference():
    earlier, later = network.Traffic(1, 10), network.Traffic(5, 30)
    assert later - earlier == network.Traffic(4, 20)


@pytest.mark.parametrize("rate", ["150mbps", "1gbit", "1.5mbit", "10kibps"])
def test_check_rate_accepts_rates_of_tc(rate):
    assert network.check_rate(rate) == rate


@pytest.mark.parametrize("rate", ["150", "fast", "150mb", "150mbps; reboot"])
def test_check_rate_refuses_others(rate):
    with pytest.raises(ValueError, match="150mbps"):
        network.check_rate(rate)


@pytest.mark.parametrize(
    ("rate", "dilation", "slower"),
    [("150mbps", 4, "37.5mbps"), ("1gbit", 1.0, "1gbit")],
)
def test_dilated_rates_have_the_same_unit(rate, dilation, slower):
    assert network.dilated(rate, dilation) == slower


def test_loopback_has_no_byte_counts():
    net = network.loopback(3)
    assert net.hosts == ("127.0.0.1",) * 3
    assert net.interface == ""


_SEND = """
import socket, sys
s = socket.create_connection((sys.argv[1], 9000), timeout=20)
s.sendall(bytes(int(sys.argv[2])))
s.shutdown(socket.SHUT_WR)
s.recv(1)
"""

_RECEIVE = """
import socket, time
from benchmarks import network
s = socket.create_server(("", 9000))
print("ready", flush=True)
before = network.read_traffic("eth0")
peer, _ = s.accept()
start, size = time.perf_counter(), 0
while chunk := peer.recv(1 << 20):
    size += len(chunk)
traffic = network.read_traffic("eth0") - before
print(size, traffic.ingress, time.perf_counter() - start)
"""


@needs_namespaces
def test_traffic_is_limited_and_counted():
    size = 4_000_000
    with network.namespaces(2, "20mbps") as net:
        receiver = subprocess.Popen(
            [*net.prefixes[1], sys.executable, "-c", _RECEIVE],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert receiver.stdout.readline() == "ready\n"
            command = [*net.prefixes[0], sys.executable, "-c", _SEND]
            subprocess.run(
                [*command, net.hosts[1], str(size)], check=True, timeout=30
            )
            output, _ = receiver.communicate(timeout=30)
        finally:
            receiver.kill()
    received, counted, seconds = output.split()
    assert int(received) == size
    assert size < int(counted) < 1.1 * size
    # 0.2 s at 20 MB/s less the burst; unlimited it takes milliseconds.
    assert float(seconds) > 0.15


@needs_namespaces
def test_networks_coexist_and_go_even_after_an_error():
    with (
        pytest.raises(KeyboardInterrupt),
        network.namespaces(2, None) as one,
        network.namespaces(2, None) as other,
    ):
        assert set(one.prefixes).isdisjoint(other.prefixes)
        names = _namespaces()
        for prefix in one.prefixes + other.prefixes:
            assert prefix[-1] in names
        raise KeyboardInterrupt
    names = _namespaces()
    for prefix in one.prefixes + other.prefixes:
        assert prefix[-1] not in names


@needs_namespaces
def test_sweep_removes_only_what_dead_processes_left():
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = f"tfd{gone.pid}x00n0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with network.namespaces(1, None) as net:
        network.sweep()
        names = _namespaces()
    assert left not in names
    assert net.prefixes[0][-1] in names


def _namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout
