# SPDX-License-Identifier: Apache-2.0
"""Passes a text on through the store that horovodrun keeps for its processes.

It speaks HTTP: PUT keeps what is sent under a path "/scope/key", and GET gives
it again, or 404 as long as nobody has sent it.
"""

from __future__ import annotations

import http
import http.client
import time

from tfdist_ext.rendezvous import connector

_REQUEST_SECONDS = 10.0
_LONGEST = 1024
_PATH = "/tfdist_ext/host_of_rank_0"


def put(store: tuple[str, int], text: str) -> None:
    """Keeps a text in the store.

    Args:
        store: host and port.
        text: of ASCII.

    Raises:
        RuntimeError: the store cannot be reached, or does not keep it.
    """
    _request(store, "PUT", text.encode("ascii"))


def get(store: tuple[str, int], timeout: float) -> str:
    """Waits until somebody has put a text.

    Args:
        store: host and port.
        timeout: seconds to wait.

    Raises:
        RuntimeError: the store cannot be reached, or nobody has.
    """
    began = time.monotonic()
    deadline = began + timeout
    while (text := _request(store, "GET")) is None:
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"rank 0 has not told the store of horovodrun at {store[0]}, "
                f"port {store[1]}, where it runs, within startup_timeout="
                f"{timeout:g} s. Is it running?"
            )
        time.sleep(connector.pause(time.monotonic() - began))
    return text


def _request(
    store: tuple[str, int], method: str, body: bytes | None = None
) -> str | None:
    """What the store answers; None for 404."""
    # Not urllib, which would ask the proxies of the environment.
    connection = http.client.HTTPConnection(*store, timeout=_REQUEST_SECONDS)
    try:
        connection.request(method, _PATH, body)
        answer = connection.getresponse()
        text = answer.read(_LONGEST).decode("ascii")
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"it answers {answer.status} to {method}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"the store of horovodrun at {store[0]}, port {store[1]}, by which "
            f"ranks learn where rank 0 runs, cannot be used: {error}. Set "
            "MASTER_ADDR to the host of rank 0 to do without."
        ) from error
    finally:
        connection.close()
    return text
