# SPDX-License-Identifier: Apache-2.0
"""Reads where srun has placed a task of a job step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.launcher import variables as variables_lib
from tfdist_ext.launcher.variables import SLURM

_MOST_NODES = 1 << 20
# A terminal of `srun --pty` belongs to the first task; the others have ended.
_TERMINAL = "SLURM_PTY_PORT"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a task is.

    Attributes:
        local_rank: among the tasks of its host.
        local_size: how many those are.
        nodes: hosts of the step.
        job: job and step.
    """

    local_rank: int
    local_size: int
    nodes: int
    job: str


def is_terminal(environment: Mapping[str, str]) -> bool:
    """Whether a person has typed what the process does."""
    return _TERMINAL in environment


def place(environment: Mapping[str, str], size: int) -> Place:
    """Reads the place of this task.

    Args:
        environment: of the process.
        size: number of tasks.

    Raises:
        variables.LaunchError: variables are missing or contradict each other.
    """
    node = variables_lib.number(environment, "SLURM_NODEID", SLURM)
    local_rank = variables_lib.number(environment, SLURM.local_rank, SLURM)
    tasks = _tasks_per_node(environment)
    job = environment.get("SLURM_JOB_ID")
    if local_rank is None or node is None or not job:
        missing = [
            name
            for name in (SLURM.local_rank, "SLURM_NODEID", "SLURM_JOB_ID")
            if not environment.get(name)
        ]
        why = f"{missing[0]} is missing"
        raise variables_lib.unusable(environment, SLURM, why)
    fits = node < len(tasks) and local_rank < tasks[node]
    if sum(tasks) != size or not fits:
        names = SLURM.local_size, "SLURM_NODEID", SLURM.local_rank
        why = "they contradict each other"
        raise variables_lib.unusable(environment, SLURM, why, *names)
    step = environment.get("SLURM_STEP_ID", "")
    return Place(local_rank, tasks[node], len(tasks), f"{job}.{step}")


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """The numbers in a text like "2(x3),1": two, three times, and one."""
    tasks: list[int] = []
    for part in environment.get(SLURM.local_size, "").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if not count.isdecimal() or not (times or "1").isdecimal():
            why = f"{SLURM.local_size} is no list of numbers like 2(x3),1"
            raise variables_lib.unusable(
                environment, SLURM, why, SLURM.local_size
            )
        tasks += [int(count)] * min(int(times or 1), _MOST_NODES)
    return tasks


def first_host(
    environment: Mapping[str, str],
    host_names: Callable[[str], Sequence[str]],
) -> str:
    """The host of the first task, for all the ways in which Slurm counts.

    Args:
        environment: of the process.
        host_names: expands a list of hosts.

    Raises:
        variables.LaunchError: the tasks are placed by a list of the user's,
            or the hosts of the step cannot be read.
    """
    names, way = "SLURM_STEP_NODELIST", "SLURM_DISTRIBUTION"
    if environment.get(way, "").startswith("arbitrary"):
        raise variables_lib.no_master(environment, SLURM, way)
    try:
        return host_names(environment[names])[0]
    except (LookupError, OSError) as error:
        why = f"the list of its hosts cannot be read ({error})"
        raise variables_lib.no_master(
            environment, SLURM, names, why=why
        ) from error
