# SPDX-License-Identifier: Apache-2.0
"""Connections that carry JSON objects, a line each, of limited length."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

_LONGEST_MESSAGE = 1 << 24
# When TCP takes a silent host for lost.
_IDLE_SECONDS, _PROBE_SECONDS, _LOST_SECONDS = 3, 2, 9


class Link:
    """One end of such a connection.

    Args:
        connection: a socket, which the link owns from now on.
        name: of the other end, for errors.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._received = bytearray()
        self.watch(True)

    def watch(self, on: bool) -> None:
        """Lets the system end the connection once the other host is silent.

        Args:
            on: whether to watch; a host that is lost is then noticed within
                9 s, and an interruption of that length ends the connection.
        """
        tcp = {
            socket.TCP_KEEPIDLE: _IDLE_SECONDS,
            socket.TCP_KEEPINTVL: _PROBE_SECONDS,
            socket.TCP_USER_TIMEOUT: 1000 * _LOST_SECONDS if on else 0,
        }
        if self._connection.family == socket.AF_UNIX:
            return
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, on)
        for option, value in tcp.items():
            self._connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def has_message(self) -> bool:
        """Whether a whole message has been read, but not been taken."""
        return b"\n" in self._received

    def fileno(self) -> int:
        return self._connection.fileno()

    def own_host(self) -> str:
        """The address of this host on this connection; "" for Unix sockets."""
        if self._connection.family == socket.AF_UNIX:
            return ""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        self._connection.close()

    def send(self, message: dict[str, Any], timeout: float) -> None:
        """Sends a message within some seconds; raises OSError if it cannot."""
        self._connection.settimeout(timeout)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next message, None if none came in time.

        Args:
            timeout: seconds.

        Raises:
            ConnectionError: the other end is gone.
            ValueError: what came is not a message.
        """
        deadline = time.monotonic() + timeout
        while (end := self._received.find(b"\n")) < 0:
            # A timeout of 0 would make the socket non-blocking.
            left = max(deadline - time.monotonic(), 1e-3)
            self._connection.settimeout(left)
            try:
                data = self._connection.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() >= deadline:
                    return None
                continue
            if not data:
                raise ConnectionError(f"{self.name} closed its connection")
            self._received += data
            if len(self._received) > _LONGEST_MESSAGE:
                raise ValueError(f"{self.name} sent too long a message")
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            message = json.loads(line)
        except RecursionError as error:
            raise ValueError(f"{self.name} sent {line[:100]!r}") from error
        if not isinstance(message, dict):
            raise ValueError(f"{self.name} sent {line[:100]!r}")
        return message
