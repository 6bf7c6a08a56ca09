# SPDX-License-Identifier: Apache-2.0
"""Starts the processes that ranks are forked from."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).parent
ENTER = HERE / "enter.py"
ROOT = HERE.parent.parent
# The tree, and what scenarios are imported from.
_PATHS = (ROOT, ROOT / "tests" / "process")


class Servers:
    """The processes that ranks are forked from, by Keras and by parity."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tfdist")
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, keras: int, ranks: int) -> dict[str, str]:
        """Variables for `enter.py`, whose servers are started.

        Args:
            keras: 3 or 2 (tf_keras).
            ranks: how many there will be.
        """
        legacy = "1" if keras == 2 else "0"
        common = {
            **{k: v for k, v in os.environ.items() if k != "TF_CONFIG"},
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_USE_LEGACY_KERAS": legacy,
        }
        for parity in range(min(ranks, 2)):
            self._start(f"keras{keras}-{parity}", common)
        paths = os.pathsep.join(map(str, _PATHS))
        # Ranks that are killed leave files behind, of AutoGraph for one.
        temporary = pathlib.Path(self._folder.name, "tmp")
        temporary.mkdir(exist_ok=True)
        return {
            **common,
            "PYTHONPATH": paths,
            "TMPDIR": str(temporary),
            "TFDIST_TEST_SERVERS": self._folder.name,
        }

    def _start(self, name: str, environment: dict[str, str]) -> None:
        server = self._servers.get(name)
        if server is not None:
            assert server.poll() is None, f"the server {name} has failed"
            return
        path = pathlib.Path(self._folder.name, name)
        self._servers[name] = subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), str(path)],
            env={
                **environment,
                "PYTHONPATH": str(ROOT),
                "TF_CPP_MIN_LOG_LEVEL": "1",  # read once: shows warnings
                # The one library that would start threads as it is loaded.
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=subprocess.PIPE,
        )
        while not path.exists():
            assert self._servers[name].poll() is None
            time.sleep(0.01)

    def close(self) -> None:
        for server in self._servers.values():
            assert server.stdin is not None
            server.stdin.close()
        for server in self._servers.values():
            server.wait(30)
        self._folder.cleanup()


def command(ranks: int, *arguments: object) -> list[str]:
    """A command that starts ranks by the product's launcher.

    Args:
        ranks: how many; 1 runs without it, and without TF_CONFIG.
        *arguments: the program and its arguments.
    """
    launcher = ["-m", "tfdist_ext.launch", "-n", str(ranks)]
    return [
        sys.executable,
        *(launcher if ranks > 1 else ()),
        str(ENTER),
        *map(str, arguments),
    ]
