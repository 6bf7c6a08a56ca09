# SPDX-License-Identifier: Apache-2.0
"""Reads from the environment which rank another launcher gave this process."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import zlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.launch import variables as variables_lib
from tfdist_ext.launch.variables import SLURM
from tfdist_ext.launch.variables import LaunchError
from tfdist_ext.launch.variables import Variables

# Names of processes that start the ranks of a host, truncated to 15 characters
# as in Linux.
_LAUNCHERS = ("hydra_pmi_proxy", "pmi_proxy", "mpispawn", "mpiexec", "mpirun")
_SCONTROL_SECONDS = 30.0


def slurm_host_names(hosts: str) -> list[str]:
    """Expands a list of hosts like "n[1-3,7]", in its order.

    Args:
        hosts: list in Slurm's notation.

    Raises:
        OSError: Slurm's own `scontrol` is missing or fails.
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

    It is the nearest ancestor with the name of a launcher, as there may be a
    shell in between. Without such an ancestor it is the parent.
    """
    for process, name in _ancestors():
        if name.startswith(_LAUNCHERS):
            return process
    return str(os.getppid())


def _ancestors() -> Iterator[tuple[str, str]]:
    """Number and name of each ancestor, the parent first."""
    process = str(os.getppid())
    while process not in ("0", "1"):
        try:
            text = pathlib.Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return
        # The name is in brackets and may have any character.
        start, _, rest = text.rpartition(")")
        yield process, start.partition("(")[2]
        process = rest.split()[1]


_MOST_NODES = 1 << 20
# Set in a terminal of `srun --pty`, which belongs to the first task; the other
# tasks have ended.
_TERMINAL = "SLURM_PTY_PORT"


@dataclasses.dataclass(frozen=True)
class SlurmPlace:
    """The position of a task in a Slurm job.

    Attributes:
        local_rank: number of the task among the tasks of its host.
        local_size: number of tasks of its host.
        nodes: number of hosts of the step.
        job: job and step.
    """

    local_rank: int
    local_size: int
    nodes: int
    job: str


def is_terminal(environment: Mapping[str, str]) -> bool:
    """Whether a user has started the process in a terminal of srun."""
    return _TERMINAL in environment


def slurm_place(environment: Mapping[str, str], size: int) -> SlurmPlace:
    """Reads the position of this task.

    Args:
        environment: variables of the process.
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
    return SlurmPlace(local_rank, tasks[node], len(tasks), f"{job}.{step}")


def _tasks_per_node(environment: Mapping[str, str]) -> list[int]:
    """The numbers in a text like "2(x3),1": three times 2, and 1."""
    tasks: list[int] = []
    for part in environment.get(SLURM.local_size, "").split(","):
        count, _, times = part.rstrip(")").partition("(x")
        if not count.isdecimal() or not (times or "1").isdecimal():
            why = f"{SLURM.local_size} is not a list of numbers like 2(x3),1"
            raise variables_lib.unusable(
                environment, SLURM, why, SLURM.local_size
            )
        tasks += [int(count)] * min(int(times or 1), _MOST_NODES)
    return tasks


def first_host(
    environment: Mapping[str, str],
    host_names: Callable[[str], Sequence[str]],
) -> str:
    """The host of the first task, whatever the distribution of tasks.

    Args:
        environment: variables of the process.
        host_names: expands a list of hosts.

    Raises:
        variables.LaunchError: the user has placed the tasks by a list, or the
            hosts of the step cannot be read.
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


_LOOPBACK = "127.0.0.1"
# These are below the ports that systems assign by themselves, from 32768.
_PORTS = range(20000, 32000)
_TORCH_PORT = 29500


@dataclasses.dataclass(frozen=True)
class Launched:
    """A process that a launcher has started, as one of several.

    Attributes:
        launcher: name of the launcher.
        rank: rank of this process.
        size: number of processes, at least 2.
        local_rank: number of this process among those of its host.
        local_size: number of processes on its host; `size` if all run on one
            host.
        master: "host:port" that rank 0 listens on while the ranks start;
            ":port" if a store has the host.
        job: identifies the job.
        variable: environment variable that has the size, and its value.
        store: "host:port" of horovodrun's store, if the ranks need it.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    master: str
    job: str
    variable: str
    store: str = ""

    @property
    def names(self) -> list[str]:
        """Names of the ranks before they are connected: rank 0's address first.

        They are equal on all ranks and differ from those of other jobs.
        """
        suffix = f"of {self.launcher}, job {self.job}"
        others = range(1, self.size)
        return [self.master, *(f"process {rank} {suffix}" for rank in others)]


@dataclasses.dataclass(frozen=True)
class Outside:
    """Information that is not in the environment.

    Attributes:
        host_names: expands a list of hosts of Slurm.
        launcher: identifies the process that started the ranks of this host.
    """

    host_names: Callable[[str], Sequence[str]] = slurm_host_names
    launcher: Callable[[], str] = launching_process


def read(
    environment: Mapping[str, str], outside: Outside | None = None
) -> Launched | None:
    """Reads which rank a launcher gave this process.

    Args:
        environment: variables of the process. TF_CONFIG is not read: this
            function is not called if that has a cluster.
        outside: by default the information of this host.

    Returns:
        The rank; None for a process that is alone.

    Raises:
        LaunchError: there are other processes, but variables are missing,
            contradict each other or are no numbers.
    """
    engine = _read_engine(environment, outside or Outside())
    named = _read_named(environment, engine)
    return named or engine


def _read_engine(
    environment: Mapping[str, str], outside: Outside
) -> Launched | None:
    """The rank according to an engine's own variables."""
    for variables in variables_lib.ENGINES:
        if variables is variables_lib.SLURM and is_terminal(environment):
            continue
        if variables is variables_lib.MPICH and _is_of_slurm(environment):
            continue
        numbers = variables_lib.numbers(environment, variables)
        if numbers is None:
            continue
        if variables is variables_lib.SLURM:
            return _of_slurm(environment, outside, *numbers)
        return _of_mpi(environment, outside, variables, *numbers)
    pmix = variables_lib.PMIX
    if variables_lib.number(environment, pmix.rank, pmix):
        why = "nothing tells how many there are"
        raise variables_lib.unusable(environment, pmix, why, pmix.rank)
    return None


def _is_of_slurm(environment: Mapping[str, str]) -> bool:
    """Whether srun has set the variables of MPICH in addition to its own."""
    theirs, ours = variables_lib.MPICH, variables_lib.SLURM
    return not is_terminal(environment) and all(
        environment.get(one) == environment.get(other)
        for one, other in ((theirs.size, ours.size), (theirs.rank, ours.rank))
    )


def _of_mpi(
    environment: Mapping[str, str],
    outside: Outside,
    variables: Variables,
    rank: int,
    size: int,
) -> Launched:
    local = variables_lib.local_numbers(environment, variables, size)
    store = ""
    if variables is variables_lib.HOROVOD and local[1] < size:
        store = _store(environment)
    host = "" if store else _host(environment, variables, size, local[1])
    job = _first_of(environment, variables.job) or outside.launcher()
    port = variables_lib.master_port(environment, variables, _port_of(job))
    return Launched(
        variables.launcher,
        rank,
        size,
        *local,
        master=addresses_lib.join(host, port),
        job=job,
        variable=f"{variables.size}={size}",
        store=store,
    )


def _store(environment: Mapping[str, str]) -> str:
    """Address of horovodrun's store; empty if it is not needed."""
    variables = variables_lib.HOROVOD
    host = environment.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "")
    name = "HOROVOD_GLOO_RENDEZVOUS_PORT"
    port = variables_lib.number(environment, name, variables)
    given = environment.get(variables_lib.MASTER_VARIABLE)
    return addresses_lib.join(host, port) if host and port and not given else ""


def _of_slurm(
    environment: Mapping[str, str], outside: Outside, rank: int, size: int
) -> Launched:
    variables = variables_lib.SLURM
    place = slurm_place(environment, size)
    host = environment.get(variables_lib.MASTER_VARIABLE, "")
    if not host and place.nodes == 1:
        host = _LOOPBACK
    if not host:
        host = first_host(environment, outside.host_names)
    port = _port_of(place.job)
    port = variables_lib.master_port(environment, variables, port)
    return Launched(
        variables.launcher,
        rank,
        size,
        place.local_rank,
        place.local_size,
        master=addresses_lib.join(host, port),
        job=place.job,
        variable=f"{variables.size}={size}",
    )


def _read_named(
    environment: Mapping[str, str], engine: Launched | None
) -> Launched | None:
    """The rank according to RANK, or to the index of a Kubernetes job.

    Args:
        environment: variables of the process.
        engine: rank according to an engine's own variables, or None. With an
            engine, these variables count only if they are complete.
    """
    variables = _variables_of_name(environment)
    complete = {variables.size, variables.rank} <= environment.keys()
    if engine is not None:
        if not complete or variables_lib.MASTER_VARIABLE not in environment:
            return None
    elif variables.size not in environment:
        if variables is variables_lib.KUBERNETES:
            why = "WORLD_SIZE, the completions of the job, is missing"
            raise variables_lib.unusable(
                environment, variables, why, variables.rank
            )
        if not environment.get(variables.rank, "").isdecimal():
            return None  # RANK of another program
    rank, size = variables_lib.numbers(environment, variables) or (0, 1)
    _check_nested(variables, rank, size, engine)
    if size == 1:
        return None
    local = variables_lib.local_numbers(environment, variables, size)
    host = _host(environment, variables, size, local[1])
    port = variables_lib.master_port(environment, variables, _TORCH_PORT)
    job = (
        _first_of(environment, variables.job)
        or f"at {addresses_lib.join(host, port)}"
    )
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # torchrun itself listens on the port in the variable.
        port = _port_of(f"{job} {port}")
    return Launched(
        variables.launcher,
        rank,
        size,
        *local,
        master=addresses_lib.join(host, port),
        job=job,
        variable=f"{variables.size}={size}",
    )


def _variables_of_name(environment: Mapping[str, str]) -> Variables:
    torch, kubernetes = variables_lib.TORCH, variables_lib.KUBERNETES
    if {torch.size, torch.rank} <= environment.keys():
        return torch  # for processes started in a pod
    return kubernetes if kubernetes.rank in environment else torch


def _check_nested(
    variables: Variables, rank: int, size: int, engine: Launched | None
) -> None:
    """Rejects two launchers that contradict each other.

    An engine may have started a launcher on each host, as srun does with
    torchrun. There are then more ranks than the engine knows.
    """
    if engine is None or size > engine.size:
        return
    if (rank, size) != (engine.rank, engine.size):
        raise LaunchError(
            f"This process is rank {engine.rank} of {engine.size} as "
            f"{engine.launcher} says ({engine.variable}), but rank {rank} of "
            f"{size} by {variables.rank} and {variables.size}. Unset those "
            f"that are wrong: {variables.size}, or "
            f"{engine.variable.partition('=')[0]}."
        )


def _host(
    environment: Mapping[str, str],
    variables: Variables,
    size: int,
    local_size: int,
) -> str:
    """The host of rank 0."""
    host = environment.get(variables_lib.MASTER_VARIABLE, "")
    if not host and local_size < size:
        raise variables_lib.no_master(
            environment, variables, variables.local_size
        )
    return host.strip("[]") or _LOOPBACK


def _first_of(environment: Mapping[str, str], names: Sequence[str]) -> str:
    return next((environment[n] for n in names if environment.get(n)), "")


def _port_of(job: str) -> int:
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]
