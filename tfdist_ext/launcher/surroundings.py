# SPDX-License-Identifier: Apache-2.0
"""What a launched process learns of its host rather than its environment."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

# Names, cut to 15 letters as Linux does, of what starts the ranks of a host.
_LAUNCHERS = ("hydra_pmi_proxy", "pmi_proxy", "mpispawn", "mpiexec", "mpirun")
_SCONTROL_SECONDS = 30.0


def slurm_host_names(hosts: str) -> list[str]:
    """Expands a list of hosts like "n[1-3,7]", in its order.

    Args:
        hosts: as Slurm writes it.

    Raises:
        OSError: Slurm's own `scontrol` is not there or cannot do it.
    """
    if "[" not in hosts:
        return hosts.split(",")
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", hosts],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_SECONDS,
            check=True,
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return done.stdout.split()


def launching_process() -> str:
    """Identifies the process that has started the ranks of this host.

    It is the nearest ancestor with the name of a launcher; a shell may stand
    between. Without one it is the parent.
    """
    for process, name in _ancestors():
        if name.startswith(_LAUNCHERS):
            return process
    return str(os.getppid())


def _ancestors() -> Iterator[tuple[str, str]]:
    """Number and name of each, the parent first."""
    process = str(os.getppid())
    while process not in ("0", "1"):
        try:
            text = pathlib.Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        # The name is in brackets and may hold any character.
        start, _, rest = text.rpartition(")")
        yield process, start.partition("(")[2]
        process = rest.split()[1]
