# SPDX-License-Identifier: Apache-2.0
"""Reads from its environment which rank another launcher made of a process.

`mpirun`, `srun`, `horovodrun`, `torchrun` and Kubernetes say to each process
which of how many it is. The ranks then need one address more, where rank 0
listens until all have come: it is given, or known of Slurm, or that of the one
host on which all run. Its port follows from what the launcher calls the job,
so that all ranks come to the same one without a word.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

from tfdist_ext.launcher import slurm
from tfdist_ext.launcher import surroundings
from tfdist_ext.launcher import variables as variables_lib
from tfdist_ext.launcher.variables import LaunchError
from tfdist_ext.launcher.variables import Variables
from tfdist_ext.rendezvous import addresses as addresses_lib

_LOOPBACK = "127.0.0.1"
# Below the ports that systems give out by themselves, of 32768 or more.
_PORTS = range(20000, 32000)
_TORCH_PORT = 29500


@dataclasses.dataclass(frozen=True)
class Launched:
    """A process that a launcher has started beside others.

    Attributes:
        launcher: its name.
        rank: of this process.
        size: how many there are, at least 2.
        local_rank: of this process among those of its host.
        local_size: how many those are; `size` where all run on one host.
        master: "host:port" at which rank 0 listens while the ranks start;
            ":port" where a store tells the host.
        job: by which it is told from others.
        variable: the environment variable that tells the size, and its value.
        store: "host:port" of the store of horovodrun, where the ranks need it.
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
        """What ranks are called before they have met: rank 0 by its address.

        They are equal on all ranks and differ from those of other jobs.
        """
        suffix = f"of {self.launcher}, job {self.job}"
        others = range(1, self.size)
        return [self.master, *(f"process {rank} {suffix}" for rank in others)]


@dataclasses.dataclass(frozen=True)
class Outside:
    """What is not in the environment.

    Attributes:
        host_names: expands a list of hosts of Slurm.
        launcher: identifies the process that has started those of this host.
    """

    host_names: Callable[[str], Sequence[str]] = surroundings.slurm_host_names
    launcher: Callable[[], str] = surroundings.launching_process


def read(
    environment: Mapping[str, str], outside: Outside | None = None
) -> Launched | None:
    """Reads what a launcher has told this process.

    Args:
        environment: of the process. TF_CONFIG is not looked at: where there
            is one, nobody needs to ask.
        outside: by default that of this host.

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
    """The rank that an engine's own variables tell."""
    for variables in variables_lib.ENGINES:
        if variables is variables_lib.SLURM and slurm.is_terminal(environment):
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
    """Whether srun has set the variables of MPICH beside its own."""
    theirs, ours = variables_lib.MPICH, variables_lib.SLURM
    return not slurm.is_terminal(environment) and all(
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
    """Where horovodrun keeps a store; empty where nobody needs it."""
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
    place = slurm.place(environment, size)
    host = environment.get(variables_lib.MASTER_VARIABLE, "")
    if not host and place.nodes == 1:
        host = _LOOPBACK
    if not host:
        host = slurm.first_host(environment, outside.host_names)
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
    """The rank that RANK tells, or the index of a Kubernetes job.

    Args:
        environment: of the process.
        engine: what an engine's own variables tell; then these count only
            where they are complete.
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
            return None  # somebody else's RANK
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
        # torchrun itself listens at the port that it names.
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
        return torch  # of what has been started in a pod
    return kubernetes if kubernetes.rank in environment else torch


def _check_nested(
    variables: Variables, rank: int, size: int, engine: Launched | None
) -> None:
    """Refuses two launchers that contradict each other.

    An engine may have started a launcher on each host, as srun does with
    torchrun: there are then more ranks than it knows of.
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
