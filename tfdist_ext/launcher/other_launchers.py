# SPDX-License-Identifier: Apache-2.0
"""Recognises processes that another launcher has started, by its variables.

No TensorFlow here: `tfdist-run` asks as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# Number of processes, and the launchers that set it for each of them. Slurm
# sets SLURM_NTASKS in batch scripts and allocations too, where one process
# runs; SLURM_STEP_NUM_TASKS is of what srun has started.
_SIZES = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun (Open MPI)",
    "MV2_COMM_WORLD_SIZE": "mpirun (MVAPICH2)",
    "PMI_SIZE": "mpirun (MPICH, Intel MPI)",
    "SLURM_STEP_NUM_TASKS": "srun",
}
# PMIx tells a process its number only.
_PMIX_RANK = "PMIX_RANK"
# A terminal of `srun --pty` belongs to the first task; the others have ended.
_SLURM_TERMINAL = "SLURM_PTY_PORT"


@dataclasses.dataclass(frozen=True)
class Launch:
    """What another launcher has started.

    Attributes:
        launcher: its name.
        variable: the environment variable that tells, and its value.
        processes: how many there are, at least.
    """

    launcher: str
    variable: str
    processes: int


def found(environment: Mapping[str, str]) -> Launch | None:
    """The launcher that started several processes of which this is one."""
    for name, launcher in _SIZES.items():
        if name == "SLURM_STEP_NUM_TASKS" and _SLURM_TERMINAL in environment:
            continue
        if (processes := _number(environment.get(name))) > 1:
            return Launch(launcher, f"{name}={processes}", processes)
    if (rank := _number(environment.get(_PMIX_RANK))) > 0:
        return Launch("a PMIx launcher", f"{_PMIX_RANK}={rank}", rank + 1)
    return None


def _number(text: str | None) -> int:
    """What a variable says; 0 for none and for what is no number."""
    return int(text) if text is not None and text.isdecimal() else 0
