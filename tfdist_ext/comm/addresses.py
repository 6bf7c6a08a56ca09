# SPDX-License-Identifier: Apache-2.0
"""Addresses "host:port" of ranks and hosts."""

from __future__ import annotations

import ipaddress
import socket

# Host and port, or the name of an abstract Unix socket.
Address = tuple[str, int] | str


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """Address of host and port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(address: str) -> str:
    """Numeric form of the host in "host:port".

    Addresses that other hosts can reach are preferred over loopback, then IPv4
    over IPv6. A rank listens on this address only, never on all interfaces.

    Raises:
        ValueError: the host has no address, or means all interfaces.
    """
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"The host of this rank's address {address!r} cannot be resolved: "
            f"{error}"
        ) from error
    found.sort(
        key=lambda entry: (
            is_loopback(str(entry[4][0])),
            entry[0] != socket.AF_INET,
        )
    )
    numeric = str(found[0][4][0])
    if ipaddress.ip_address(numeric.split("%")[0]).is_unspecified:
        raise ValueError(
            f"The address {address!r} means all interfaces; give the host's "
            "own address, which the other ranks can reach."
        )
    return numeric


def is_loopback(numeric: str) -> bool:
    """Whether only processes of this host can reach a numeric address."""
    return ipaddress.ip_address(numeric.split("%")[0]).is_loopback


def of_this_user(host: str, port: int) -> Address:
    """Address at which processes without a secret connect.

    Args:
        host: name or numeric address.
        port: port on that host.

    Returns:
        For loopback, the name of an abstract Unix socket, as the kernel tells
        both ends the user of the other; else host and port.
    """
    try:
        numeric = bind_address(join(host, port))
    except ValueError:
        return host, port
    return f"tfdist {numeric} {port}" if is_loopback(numeric) else (host, port)


def is_local_name(host: str) -> bool:
    """Whether a host name means loopback in every network."""
    return host in ("localhost", "::1") or host.startswith("127.")


def is_of_this_host(host: str) -> bool:
    """Whether a host name means loopback on this host."""
    if is_local_name(host):
        return True
    try:
        return is_loopback(bind_address(join(host, 0)))
    except ValueError:
        return False
