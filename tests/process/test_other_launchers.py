# SPDX-License-Identifier: Apache-2.0
"""What mpirun, srun and others start trains as one job, where they are."""

import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.process import slurm_of_one_node
from tfdist_ext.launcher import surroundings

PROGRAM = pathlib.Path(__file__).with_name("launched_program.py")
LIMIT = 300.0
RUN = [sys.executable, "-m", "tfdist_ext.launch"]


def started(folder, *command, **environment):
    """Runs a command line that ends in our program; the files it leaves."""
    folder.mkdir()
    done = subprocess.run(
        [*command, str(PROGRAM), str(folder)],
        env={**os.environ, "TF_NUM_INTRAOP_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {
        path.stem: list(np.load(path).values()) for path in folder.iterdir()
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process trains."""
    folder = tmp_path_factory.mktemp("alone") / "results"
    return started(folder, sys.executable)["0-of-1"]


def check(found, alone):
    assert set(found) == {"0-of-2", "1-of-2"}
    for result in found.values():
        for a, b in zip(result, alone, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


MPI = {
    "mpirun.openmpi": ["--allow-run-as-root", "--oversubscribe"],
    "mpiexec.hydra": [],  # of MPICH and Intel MPI
}


@pytest.mark.parametrize("command", [[sys.executable], RUN])
@pytest.mark.parametrize("mpi", MPI)
def test_mpirun(tmp_path, alone, mpi, command):
    if shutil.which(mpi) is None:
        pytest.skip(f"no {mpi} is installed")
    start = [mpi, *MPI[mpi], "-n", "2"]
    check(started(tmp_path / "results", *start, *command), alone)


@pytest.mark.parametrize("hosts", ["localhost:2", "localhost:1,127.0.0.1:1"])
def test_horovodrun(tmp_path, alone, hosts):
    pytest.importorskip("horovod.runner", reason="no horovodrun is installed")
    # Its own library may be left out: only the launcher is needed.
    run = (
        "import sys, horovod.runner.launch as launch;"
        "launch.gloo_built = lambda verbose=False: True;"
        "sys.exit(launch.run_commandline())"
    )
    start = [sys.executable, "-c", run, "-np", "2", "-H", hosts]
    check(started(tmp_path / "results", *start, sys.executable), alone)


@pytest.mark.parametrize("command", [[sys.executable], RUN])
def test_srun(tmp_path, alone, command, monkeypatch):
    if why := slurm_of_one_node.why_not():
        pytest.skip(why)
    (tmp_path / "slurm").mkdir()
    with slurm_of_one_node.started(tmp_path / "slurm") as environment:
        found = started(
            tmp_path / "results", "srun", "-n2", *command, **environment
        )
        monkeypatch.setenv("SLURM_CONF", environment["SLURM_CONF"])
        hosts = surroundings.slurm_host_names("n[9-11],m1")
    check(found, alone)
    assert hosts == ["n9", "n10", "n11", "m1"]
