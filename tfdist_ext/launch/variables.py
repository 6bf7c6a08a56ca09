# SPDX-License-Identifier: Apache-2.0
"""The variables by which launchers tell a process its rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

# Variable that sets when ranks compare their steps with one process.
CHECK_VARIABLE = "TFDIST_CHECK"
MASTER_VARIABLE = "MASTER_ADDR"
PORT_VARIABLE = "MASTER_PORT"
_MOST = 1 << 20  # most ranks


class LaunchError(RuntimeError):
    """The environment has other processes, but not how to reach them."""


@dataclasses.dataclass(frozen=True)
class Variables:
    """The variables of a launcher.

    Attributes:
        launcher: name of the launcher.
        size: variable with the number of processes. For Slurm it is
            SLURM_STEP_NUM_TASKS, of the tasks that srun has started:
            SLURM_NTASKS is also set in the batch script of a job, which is one
            process.
        rank: variable with the rank of the process.
        local_size: variable with the number of processes on the host.
        local_rank: variable with the number of the process among those.
        job: variables that identify the job; the first one that is set is used.
    """

    launcher: str
    size: str
    rank: str
    local_size: str
    local_rank: str
    job: tuple[str, ...] = ()


SLURM = Variables(
    "srun",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_PROCID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_LOCALID",
)
MPICH = Variables(
    "mpirun (MPICH, Intel MPI)",
    "PMI_SIZE",
    "PMI_RANK",
    "MPI_LOCALNRANKS",
    "MPI_LOCALRANKID",
)
TORCH = Variables(
    "a launcher like torchrun",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
    ("TORCHELASTIC_RUN_ID",),
)
KUBERNETES = Variables(
    "an indexed job of Kubernetes",
    "WORLD_SIZE",
    "JOB_COMPLETION_INDEX",
    "LOCAL_WORLD_SIZE",
    "LOCAL_RANK",
)
PMIX = Variables("a PMIx launcher", "PMIX_SIZE", "PMIX_RANK", "", "")
HOROVOD = Variables(
    "horovodrun",
    "HOROVOD_SIZE",
    "HOROVOD_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_LOCAL_RANK",
    ("HOROVOD_GLOO_RENDEZVOUS_PORT",),
)
# The first one that is set is used: srun may have started the processes that
# mpirun needs.
ENGINES = (
    HOROVOD,
    Variables(
        "mpirun (Open MPI)",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    Variables(
        "mpirun (MVAPICH2)",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
    ),
    MPICH,
    SLURM,
)


def numbers(
    environment: Mapping[str, str], variables: Variables
) -> tuple[int, int] | None:
    """Reads rank and size.

    Args:
        environment: variables of the process.
        variables: variables of the launcher.

    Returns:
        Both; None for a process that is alone.

    Raises:
        LaunchError: one of them is missing, or they contradict each other.
    """
    size = number(environment, variables.size, variables)
    rank = number(environment, variables.rank, variables)
    if size is None and rank:
        why = f"{variables.size} is missing"
        raise unusable(environment, variables, why, variables.rank)
    if size is None or (size == 1 and not rank):
        return None
    if rank is None:
        raise unusable(environment, variables, f"{variables.rank} is missing")
    if not rank < size <= _MOST:
        why = f"the rank must be at least 0 and below the size, at most {_MOST}"
        raise unusable(environment, variables, why, variables.rank)
    return rank, size


def local_numbers(
    environment: Mapping[str, str], variables: Variables, size: int
) -> tuple[int, int]:
    """Reads rank and size on this host; by default 0 and 1.

    Args:
        environment: variables of the process.
        variables: variables of the launcher.
        size: number of processes on all hosts.

    Raises:
        LaunchError: they contradict each other.
    """
    local_size = number(environment, variables.local_size, variables)
    local_rank = number(environment, variables.local_rank, variables)
    if local_size is None:
        return 0, 1
    local_rank = local_rank or 0
    if not local_rank < local_size <= size:
        names = variables.local_size, variables.local_rank
        why = "they contradict each other"
        raise unusable(environment, variables, why, *names)
    return local_rank, local_size


def number(
    environment: Mapping[str, str], name: str, variables: Variables
) -> int | None:
    """The number in a variable; None if it is empty or not set.

    Raises:
        LaunchError: it is no number.
    """
    text = environment.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        why = f"{name} is not a number of processes"
        raise unusable(environment, variables, why, name)
    return int(text)


def master_port(
    environment: Mapping[str, str], variables: Variables, default: int
) -> int:
    """The port that rank 0 listens on, MASTER_PORT if that is set.

    Raises:
        LaunchError: it is no port.
    """
    text = environment.get(PORT_VARIABLE) or str(default)
    port = int(text) if text.isascii() and text.isdecimal() else 0
    if not 0 < port < 1 << 16:
        why = f"{PORT_VARIABLE} must be a port from 1 to 65535"
        raise unusable(environment, variables, why, PORT_VARIABLE)
    return port


def no_master(
    environment: Mapping[str, str],
    variables: Variables,
    *names: str,
    why: str = "the ranks are on several hosts, or may be",
) -> LaunchError:
    """An error for ranks that do not know the host of rank 0."""
    return unusable(
        environment,
        variables,
        f"{why}, and no variable says where rank 0 runs. Set "
        f"{MASTER_VARIABLE}, on all ranks, to the address by which the others "
        "reach the host of rank 0, for example by `export "
        f"{MASTER_VARIABLE}=HOST` and `mpirun -x {MASTER_VARIABLE}` "
        f"({PORT_VARIABLE} may name a free port there)",
        *names,
    )


def unusable(
    environment: Mapping[str, str],
    variables: Variables,
    why: str,
    *names: str,
) -> LaunchError:
    """An error that says what is wrong, what was read and what to do.

    Args:
        environment: variables of the process.
        variables: variables of the launcher.
        why: what is wrong, without a full stop.
        names: names of variables to show in addition to the size.
    """
    received = {
        name: environment[name][:200]
        for name in (variables.size, *names)
        if environment.get(name)
    }
    shown = ", ".join(f"{name}={text}" for name, text in received.items())
    return LaunchError(
        f"{variables.launcher} has started this process as one of several, "
        f"but they cannot find each other: {why}. Received: {shown}. Correct "
        "these variables, or start the program by `tfdist-run -n RANKS "
        "train.py`, on several hosts once on each with --nnodes, --node-rank "
        "and --master, or set TF_CONFIG for every process. To train in one "
        f"process, unset {next(iter(received))}."
    )
