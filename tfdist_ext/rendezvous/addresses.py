# SPDX-License-Identifier: Apache-2.0
"""Addresses "host:port" of ranks and hosts."""

from __future__ import annotations

import ipaddress
import socket


def split(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of "host:port" or "[host]:port"."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """An address of host and port, with brackets around one of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind_address(address: str) -> str:
    """Numeric form of the host in "host:port", IPv4 if it has one.

    A rank listens on this address only, never on all interfaces.

    Raises:
        ValueError: the host has no address, or stands for all interfaces.
    """
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(
            f"The host of this rank's address {address!r} cannot be resolved: "
            f"{error}"
        ) from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    numeric = str(found[0][4][0])
    if ipaddress.ip_address(numeric.split("%")[0]).is_unspecified:
        raise ValueError(
            f"The address {address!r} stands for all interfaces; give the "
            "host's own address, by which the other ranks reach it."
        )
    return numeric


def is_loopback(numeric: str) -> bool:
    """Whether only processes of this host reach a numeric address."""
    return ipaddress.ip_address(numeric.split("%")[0]).is_loopback


def is_local_name(host: str) -> bool:
    """Whether a host is named as only itself does, in every network."""
    return host == "localhost" or host.startswith("127.")
