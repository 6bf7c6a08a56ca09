# SPDX-License-Identifier: Apache-2.0
"""Where a rank listens while the others connect to it, as its host says."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import ipaddress
import pathlib
import socket
import struct
from collections.abc import Collection
from collections.abc import Mapping

from tfdist_ext.rendezvous import addresses as addresses_lib
from tfdist_ext.rendezvous.listener import Listener

INTERFACE_VARIABLE = "TFDIST_INTERFACE"
PORTS_VARIABLE = "TFDIST_PORT_RANGE"

_SIOCGIFADDR = 0x8915
_GLOBAL_SCOPE = "00"
_SYSTEMS_CHOICE = range(1)


@dataclasses.dataclass(frozen=True)
class Listening:
    """What the environment of a rank says; nothing by default.

    Attributes:
        interface: by whose address the others reach this rank: the name of a
            network interface or a numeric address; empty for the host that
            `TF_CONFIG` names.
        ports: one of which it listens on; `range(1)` for the system's choice.
    """

    interface: str = ""
    ports: range = _SYSTEMS_CHOICE

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Listening:
        """Reads `TFDIST_INTERFACE` and `TFDIST_PORT_RANGE`.

        Args:
            environment: of the process.

        Raises:
            ValueError: a range that is none.
        """
        text = environment.get(PORTS_VARIABLE, "")
        return cls(
            environment.get(INTERFACE_VARIABLE, ""),
            _ports(text) if text else _SYSTEMS_CHOICE,
        )

    def host(self, address: str) -> str:
        """Numeric address to listen on.

        Args:
            address: "host:port" of this rank in `TF_CONFIG`.

        Raises:
            ValueError: there is no such interface, or it has no address.
        """
        if not self.interface:
            return addresses_lib.bind_address(address)
        try:
            return str(ipaddress.ip_address(self.interface))
        except ValueError:
            return _address_of(self.interface)

    def open(self, address: str, numbers: Collection[int]) -> Listener:
        """Listens at the first port that is free.

        Args:
            address: see `host`.
            numbers: see `Listener`.

        Raises:
            OSError: no port is free, or the address is not of this host.
            ValueError: see `host`.
        """
        host = self.host(address)
        for port in self.ports:
            try:
                return Listener((host, port), numbers)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        raise OSError(
            errno.EADDRINUSE,
            f"all ports of {PORTS_VARIABLE}={self.ports[0]}-{self.ports[-1]} "
            "are taken",
        )


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(
            f"{PORTS_VARIABLE} must be FIRST-LAST, within 1 to 65535, like "
            f"20000-20999. Received: {PORTS_VARIABLE}={text}"
        )
    return ports


def _address_of(interface: str) -> str:
    """The first address of a network interface, IPv4 if it has one."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ValueError(
            f"{INTERFACE_VARIABLE}={interface} is neither an address nor a "
            f"network interface of this host, which has {', '.join(names)}."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        request = struct.pack("256s", interface.encode())
        try:
            answer = fcntl.ioctl(query, _SIOCGIFADDR, request)
            return socket.inet_ntoa(answer[20:24])
        except OSError:
            pass  # it has none of IPv4
    known = pathlib.Path("/proc/net/if_inet6")
    for line in known.read_text().splitlines() if known.exists() else ():
        number, _, _, scope, _, name = line.split()
        if name == interface and scope == _GLOBAL_SCOPE:
            return str(ipaddress.IPv6Address(bytes.fromhex(number)))
    raise ValueError(
        f"{INTERFACE_VARIABLE}={interface}: this interface has no address by "
        "which other hosts reach it."
    )
