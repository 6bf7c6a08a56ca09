# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several ranks of this machine, with a time limit."""

from __future__ import annotations

import pathlib
import subprocess

from tests.ranks.servers import Servers
from tests.ranks.servers import command


class Programs:
    """Runs programs with the product's launcher, in forked processes.

    Args:
        servers: what they are forked from.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def __call__(
        self,
        program: str | pathlib.Path,
        ranks: int,
        *arguments: object,
        keras: int = 3,
        timeout: float = 800,
        folder: pathlib.Path | None = None,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, which must succeed.

        Args:
            program: its path.
            ranks: number of ranks; 1 runs without TF_CONFIG.
            *arguments: of the program.
            keras: 3 or 2 (tf_keras).
            timeout: seconds.
            folder: where it runs; here by default.
            **environment: more environment variables.

        Returns:
            The finished process, with exit code 0.
        """
        done = subprocess.run(
            command(ranks, program, *arguments),
            env={**self._servers.environment(keras, ranks), **environment},
            timeout=timeout,
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-12000:]
        return done
