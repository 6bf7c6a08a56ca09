# SPDX-License-Identifier: Apache-2.0
"""What launchers tell a process, as their environments show it."""

import pathlib

import pytest

from tfdist_ext.launch import launched
from tfdist_ext.launch import launched as launched_lib
from tfdist_ext.launch.variables import LaunchError

HOSTS = {"n[9-10]": ["n9", "n10"], "n[9-11]": ["n9", "n10", "n11"]}
OUTSIDE = launched_lib.Outside(
    host_names=lambda hosts: HOSTS[hosts], launcher=lambda: "4711"
)


def read(environment):
    return launched_lib.read(environment, OUTSIDE)


def open_mpi(rank, size, local_rank, local_size, **more):
    # Of Open MPI 4.1.4; version 5 has another form of PMIX_NAMESPACE.
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(local_size),
        "PMIX_NAMESPACE": "3526950913",
        "PMIX_RANK": str(rank),
        **more,
    }


def slurm(rank, size, node, local_rank, tasks, **more):
    return {
        "SLURM_JOB_ID": "51",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_NTASKS": str(size),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": "n[9-11]",
        **more,
    }


def mpich(rank, size, local_rank, local_size, **more):
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local_rank),
        "MPI_LOCALNRANKS": str(local_size),
        **more,
    }


def horovodrun(rank, size, local_rank, local_size, **more):
    return {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(local_rank),
        "HOROVOD_LOCAL_SIZE": str(local_size),
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "38211",
        **more,
    }


def torchrun(rank, size, local_rank, local_size, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": "n9",
        "MASTER_PORT": "7000",
        **more,
    }


# Environment; then rank, size, local rank and size, and host of rank 0.
STARTED = [
    (open_mpi(1, 2, 1, 2), (1, 2, 1, 2), "127.0.0.1"),
    (open_mpi(10, 11, 10, 11), (10, 11, 10, 11), "127.0.0.1"),
    (open_mpi(3, 11, 0, 1, MASTER_ADDR="n9"), (3, 11, 0, 1), "n9"),
    (open_mpi(1, 2, 1, 2, MASTER_ADDR="::1"), (1, 2, 1, 2), "[::1]"),
    (mpich(2, 4, 2, 4), (2, 4, 2, 4), "127.0.0.1"),
    (mpich(2, 4, 0, 2, MASTER_ADDR="n9"), (2, 4, 0, 2), "n9"),
    (horovodrun(1, 2, 1, 2), (1, 2, 1, 2), "127.0.0.1"),
    (slurm(1, 2, 0, 1, "2"), (1, 2, 1, 2), "127.0.0.1"),
    (slurm(10, 11, 2, 0, "5(x2),1"), (10, 11, 0, 1), "n9"),
    (slurm(4, 11, 0, 4, "5(x2),1"), (4, 11, 4, 5), "n9"),
    # Dealt out in turn: task 1 is the first of the second host.
    (slurm(1, 4, 1, 0, "2(x2)"), (1, 4, 0, 2), "n9"),
    (slurm(1, 2, 1, 0, "1(x2)", MASTER_ADDR="b9"), (1, 2, 0, 1), "b9"),
    # srun --mpi=pmi2 sets the variables of MPICH as well.
    (
        slurm(3, 4, 1, 1, "2(x2)", PMI_SIZE="4", PMI_RANK="3"),
        (3, 4, 1, 2),
        "n9",
    ),
    # mpirun has started its servers by srun, one on each host.
    (
        {**slurm(0, 2, 0, 0, "1(x2)"), **open_mpi(1, 2, 1, 2)},
        (1, 2, 1, 2),
        "127.0.0.1",
    ),
    (
        {**slurm(1, 2, 1, 0, "1(x2)"), **mpich(2, 4, 2, 4)},
        (2, 4, 2, 4),
        "127.0.0.1",
    ),
    (torchrun(3, 4, 1, 2), (3, 4, 1, 2), "n9"),
    # srun has started a torchrun on each host, or each says the same.
    (
        {**slurm(1, 2, 1, 0, "1(x2)"), **torchrun(3, 4, 1, 2)},
        (3, 4, 1, 2),
        "n9",
    ),
    ({**mpich(1, 2, 0, 1), **torchrun(1, 2, 0, 1)}, (1, 2, 0, 1), "n9"),
    (
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n9"},
        (1, 2, 0, 1),
        "n9",
    ),
    # An indexed job of 11 pods, and torchrun in the pods of one.
    (
        {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "11", "MASTER_ADDR": "p-0"},
        (3, 11, 0, 1),
        "p-0",
    ),
    (
        {**torchrun(3, 4, 1, 2), "JOB_COMPLETION_INDEX": "1"},
        (3, 4, 1, 2),
        "n9",
    ),
]


@pytest.mark.parametrize(("environment", "numbers", "host"), STARTED)
def test_a_started_process_knows_its_rank(environment, numbers, host):
    found = read(environment)
    local = (found.local_rank, found.local_size)
    assert (found.rank, found.size, *local) == numbers
    assert found.master.rpartition(":")[0] == host
    assert len(set(found.names)) == found.size
    assert found.names[0] == found.master


ALONE = [
    {},
    open_mpi(0, 1, 0, 1),
    mpich(0, 1, 0, 1),
    horovodrun(0, 1, 0, 1),
    slurm(0, 1, 0, 0, "1"),
    torchrun(0, 1, 0, 1),
    {"PMIX_RANK": "0"},
    {"PMI_SIZE": ""},
    # A batch script, the terminal of salloc, and that of srun --pty.
    {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "8"},
    {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "3333"},
    # Variables that mean something else, and an indexed job of one.
    {"RANK": "major"},
    {"MASTER_ADDR": "n9", "MASTER_PORT": "7000"},
    {"JOB_COMPLETION_INDEX": "0", "WORLD_SIZE": "1"},
]


@pytest.mark.parametrize("environment", ALONE)
def test_a_single_process_is_alone(environment):
    assert read(environment) is None


WRONG = [
    # Partial.
    ({"HOROVOD_SIZE": "2"}, "horovodrun.*HOROVOD_RANK is missing"),
    ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is missing"),
    ({"SLURM_PROCID": "1"}, "srun.*SLURM_STEP_NUM_TASKS is missing"),
    ({"SLURM_STEP_NUM_TASKS": "2"}, "srun.*SLURM_PROCID is missing"),
    (slurm(1, 2, 0, 1, ""), "SLURM_STEP_TASKS_PER_NODE is not a list"),
    (slurm(1, 2, 0, 1, "2", SLURM_JOB_ID=""), "SLURM_JOB_ID is missing"),
    ({"MV2_COMM_WORLD_SIZE": "4"}, "MVAPICH2.*MV2_COMM_WORLD_RANK is missing"),
    ({"PMIX_RANK": "1"}, "PMIx.*how many"),
    ({"WORLD_SIZE": "2"}, "torchrun.*RANK is missing"),
    ({"RANK": "1"}, "torchrun.*WORLD_SIZE is missing"),
    ({"JOB_COMPLETION_INDEX": "0"}, "Kubernetes.*WORLD_SIZE, the completions"),
    # Without the host of rank 0.
    (
        open_mpi(1, 2, 0, 1),
        "no variable says where rank 0 runs.*-x MASTER_ADDR",
    ),
    (mpich(2, 4, 0, 2), "MPICH.*no variable says where rank 0 runs"),
    (
        horovodrun(1, 2, 0, 1, HOROVOD_GLOO_RENDEZVOUS_ADDR=""),
        "horovodrun.*no variable says where rank 0 runs",
    ),
    ({"RANK": "1", "WORLD_SIZE": "2"}, "no variable says where rank 0 runs"),
    (
        {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"},
        "Kubernetes.*no variable says where rank 0 runs",
    ),
    (
        slurm(1, 2, 1, 0, "1(x2)", SLURM_DISTRIBUTION="arbitrary"),
        "no variable says where rank 0 runs.*SLURM_DISTRIBUTION=arbitrary",
    ),
    (
        slurm(1, 2, 1, 0, "1(x2)", SLURM_STEP_NODELIST="x[1-2]"),
        "list of its hosts cannot be read",
    ),
    # Contradictory.
    (open_mpi(2, 2, 1, 2), "below the size"),
    (open_mpi(1, 1, 0, 1), "below the size"),
    (open_mpi(1, 2, 2, 2), "contradict.*OMPI_COMM_WORLD_LOCAL_RANK=2"),
    (open_mpi(1, 2, 1, 3), "contradict.*OMPI_COMM_WORLD_LOCAL_SIZE=3"),
    (slurm(1, 2, 0, 1, "1(x2)"), "contradict.*SLURM_LOCALID=1"),
    (slurm(1, 2, 2, 0, "1(x2)"), "contradict.*SLURM_NODEID=2"),
    (slurm(1, 3, 1, 0, "1(x2)"), "contradict"),
    (
        {**open_mpi(1, 2, 1, 2), **torchrun(0, 1, 0, 1)},
        "rank 1 of 2 .*but rank 0 of 1.*Unset.*OMPI_COMM_WORLD_SIZE",
    ),
    (
        {**slurm(1, 2, 1, 0, "1(x2)"), **torchrun(0, 2, 0, 1)},
        "rank 1 of 2 .*but rank 0 of 2.*Unset",
    ),
    # Nonsense.
    ({"HOROVOD_SIZE": "many"}, "HOROVOD_SIZE is not a number"),
    (open_mpi("-1", 2, 0, 2), "OMPI_COMM_WORLD_RANK is not a number"),
    (open_mpi("\u0661", 2, 0, 2), "OMPI_COMM_WORLD_RANK is not a number"),
    (mpich(0, 10**10, 0, 2), "PMI_SIZE is not a number"),
    (mpich(0, 10**8, 0, 2), "at most 1048576"),
    (mpich(0, 0, 0, 0), "below the size"),
    (slurm(1, 2, 0, 1, "2(xx)"), "SLURM_STEP_TASKS_PER_NODE is not a list"),
    (slurm(1, 2, 0, 1, "2", MASTER_PORT="0"), "MASTER_PORT must be a port"),
    (torchrun(1, 2, 1, 2, MASTER_PORT="99999"), "MASTER_PORT must be a port"),
]


@pytest.mark.parametrize(("environment", "message"), WRONG)
def test_who_has_others_and_cannot_meet_them_says_so(environment, message):
    with pytest.raises(LaunchError, match=message) as caught:
        read(environment)
    assert "nset " in str(caught.value)  # what makes it train alone


def test_all_ranks_come_to_one_port_of_their_job():
    ranks = [read(open_mpi(rank, 11, rank, 11)) for rank in range(11)]
    assert len({(rank.master, *rank.names) for rank in ranks}) == 1
    other = read(open_mpi(0, 11, 0, 11, PMIX_NAMESPACE="3526950914"))
    assert other.names[1] != ranks[0].names[1]
    ports = {
        int(read(slurm(0, 2, 0, 0, "2", SLURM_JOB_ID=str(job))).master[10:])
        for job in range(100)
    }
    assert len(ports) > 90  # a few may share one: they are hashed
    assert min(ports) >= 20000 and max(ports) < 32000  # no ephemeral ones


def test_horovodrun_keeps_a_store_that_tells_the_host_of_rank_0():
    assert read(horovodrun(1, 2, 1, 2)).store == ""
    several = read(horovodrun(1, 2, 0, 1))
    assert several.store == "10.0.0.1:38211"
    assert several.master.partition(":")[0] == ""
    assert not read(horovodrun(1, 2, 0, 1, MASTER_ADDR="n9")).store


def test_a_port_can_be_chosen():
    chosen = slurm(1, 2, 1, 0, "1(x2)", MASTER_PORT="7001")
    assert read(chosen).master == "n9:7001"
    assert read(torchrun(1, 2, 1, 2)).master == "n9:7000"
    # Of PyTorch's own default, and one at which torchrun does not listen.
    assert read(torchrun(1, 2, 1, 2, MASTER_PORT="")).master == "n9:29500"
    theirs = torchrun(1, 2, 1, 2, TORCHELASTIC_USE_AGENT_STORE="True")
    host, port = read(theirs).master.split(":")
    assert host == "n9" and int(port) in range(20000, 32000)


def test_the_launcher_of_a_host_is_found_behind_a_shell(monkeypatch):
    tree = {"30": ("sh (x)", "20"), "20": ("hydra_pmi_proxy", "10")}

    def read_text(path):
        name, parent = tree[path.parts[2]]
        return f"{path.parts[2]} ({name}) S {parent} 1 1"

    monkeypatch.setattr(launched.os, "getppid", lambda: 30)
    monkeypatch.setattr(pathlib.Path, "read_text", read_text)
    assert launched.launching_process() == "20"
    tree["20"] = ("bash", "1")
    assert launched.launching_process() == "30"


def test_hosts_without_a_range_need_no_slurm(monkeypatch):
    assert launched.slurm_host_names("n10,n9") == ["n10", "n9"]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(OSError, match="scontrol"):
        launched.slurm_host_names("n[9-10]")
