# SPDX-License-Identifier: Apache-2.0
"""A network of its own for every rank: namespaces, limits, byte counters.

    rank 0            rank 1              one namespace per rank, 10.77.0.(r+1)
    eth0  tbf         eth0  tbf           limits what the rank sends
      |                 |
    veth  tbf         veth  tbf           limits what the rank receives
      +------ bridge ---+

Names carry the harness's process id and a random part, so several runs coexist
on one machine, and a run that was killed is swept up by the next one.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import secrets
import shutil
import subprocess
from collections.abc import Iterator

SUBNET = "10.77.0"
INTERFACE = "eth0"
_NETNS_FOLDER = pathlib.Path("/run/netns")
_NAME = re.compile(r"tfd(?P<pid>\d+)x(?P<token>[0-9a-f]{2})(n|v|b)\d*")
_NUMBER_AND_UNIT = re.compile(r"([\d.]+)(\w+)")
_RATE = re.compile(r"\d+(\.\d+)?([kmgt]i?)?(bit|bps)")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes an interface has sent and received since it was made."""

    egress: int
    ingress: int

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            self.egress - earlier.egress, self.ingress - earlier.ingress
        )


@dataclasses.dataclass(frozen=True)
class Network:
    """Where the ranks live.

    Attributes:
        hosts: address of every rank.
        prefixes: command prefix that enters the network of every rank.
        interface: interface that carries the ranks' traffic and nothing
            else, or "" when its bytes cannot be told apart (loopback).
        roles: TensorFlow's job of every rank, or () when all are workers.
    """

    hosts: tuple[str, ...]
    prefixes: tuple[tuple[str, ...], ...]
    interface: str
    roles: tuple[str, ...] = ()


def check_rate(rate: str) -> str:
    """Returns `rate` if `tc` knows it, such as "150mbps" (megabytes/s).

    Raises:
        ValueError: the rate has no unit or an unknown one.
    """
    if not _RATE.fullmatch(rate):
        raise ValueError(
            "Argument `egress` must be a rate of tc, such as 150mbps "
            f"(megabytes per second) or 1gbit. Received: {rate!r}"
        )
    return rate


def dilated(rate: str, dilation: float) -> str:
    """Returns `rate` divided by `dilation`, in the same unit."""
    number, unit = _NUMBER_AND_UNIT.fullmatch(check_rate(rate)).groups()
    return f"{float(number) / dilation:g}{unit}"


def reason_unavailable() -> str:
    """Says why this machine cannot make namespaces, or returns ""."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing (Debian package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"tfd{os.getpid()}x{secrets.token_hex(1)}n99"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True
    )
    if made.returncode:
        return f"`ip netns add` fails: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return ""


def loopback(ranks: int) -> Network:
    """All ranks on 127.0.0.1, without limits and without byte counters."""
    return Network(("127.0.0.1",) * ranks, ((),) * ranks, "")


@contextlib.contextmanager
def namespaces(ranks: int, rate: str | None) -> Iterator[Network]:
    """One namespace per rank on a bridge; removed on every way out.

    Args:
        ranks: number of namespaces.
        rate: limit of each rank's egress and of its ingress in units of
            `tc` ("150mbps" is 150 MB/s), or None for no limit.
    """
    sweep()
    stem = f"tfd{os.getpid()}x{secrets.token_hex(1)}"
    try:
        _build(stem, ranks, rate)
        yield Network(
            tuple(_address(rank) for rank in range(ranks)),
            tuple(
                ("ip", "netns", "exec", f"{stem}n{rank}")
                for rank in range(ranks)
            ),
            INTERFACE,
        )
    finally:
        _remove(stem)


def read_traffic(
    interface: str, table: pathlib.Path = pathlib.Path("/proc/self/net/dev")
) -> Traffic:
    """Reads the byte counters of `interface` in this process's namespace.

    Raises:
        ValueError: there is no such interface.
    """
    for line in table.read_text().splitlines():
        name, colon, counters = line.partition(":")
        if colon and name.strip() == interface:
            fields = counters.split()
            return Traffic(egress=int(fields[8]), ingress=int(fields[0]))
    raise ValueError(f"No interface {interface!r} in {table}")


def sweep() -> None:
    """Removes what harness processes that no longer exist left behind."""
    for name in _namespace_names() + _link_names():
        match = _NAME.fullmatch(name)
        if match and not pathlib.Path("/proc", match["pid"]).exists():
            _remove(f"tfd{match['pid']}x{match['token']}")


def _build(stem: str, ranks: int, rate: str | None) -> None:
    bridge = f"{stem}b"
    _run("ip", "link", "add", bridge, "type", "bridge")
    _run("ip", "link", "set", bridge, "up")
    for rank in range(ranks):
        _add_rank(stem, rank)
        if rate:
            limit = ("root", "tbf", "rate", rate)
            limit += ("burst", "256kb", "latency", "100ms")
            inside = ("-n", f"{stem}n{rank}", "qdisc", "add", "dev", INTERFACE)
            _run("tc", *inside, *limit)
            _run("tc", "qdisc", "add", "dev", f"{stem}v{rank}", *limit)


def _add_rank(stem: str, rank: int) -> None:
    namespace, veth = f"{stem}n{rank}", f"{stem}v{rank}"
    peer = ("peer", "name", INTERFACE, "netns", namespace)
    _run("ip", "netns", "add", namespace)
    _run("ip", "link", "add", veth, "type", "veth", *peer)
    _run("ip", "link", "set", veth, "master", f"{stem}b", "up")
    address = f"{_address(rank)}/24"
    _run("ip", "-n", namespace, "addr", "add", address, "dev", INTERFACE)
    _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
    _run("ip", "-n", namespace, "link", "set", "lo", "up")


def _remove(stem: str) -> None:
    """Removes all of a run; goes on when a part never came into being."""
    for name in _namespace_names():
        if name.startswith(f"{stem}n"):
            _run("ip", "netns", "del", name, check=False)
    for name in _link_names():
        if name.startswith(stem):
            _run("ip", "link", "del", name, check=False)


def _namespace_names() -> list[str]:
    if not _NETNS_FOLDER.is_dir():
        return []
    return [path.name for path in _NETNS_FOLDER.iterdir()]


def _link_names() -> list[str]:
    return os.listdir("/sys/class/net")


def _address(rank: int) -> str:
    return f"{SUBNET}.{rank + 1}"


def _run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}"
        )
