# SPDX-License-Identifier: Apache-2.0
"""What mpirun, srun and others start trains as one job, where they are."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.process import slurm_of_one_node
from tfdist_ext.launch import launched

PROGRAM = pathlib.Path(__file__).with_name("launched_program.py")
CLUSTERS = PROGRAM.parents[2] / "examples" / "clusters"
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


@pytest.mark.parametrize("ranks", [2, 4])
def test_horovod_carries_the_messages(tmp_path, ranks):
    """By the real library: equal numbers, and what is refused."""
    found = importlib.util.find_spec("horovod")
    folder = found and pathlib.Path(found.origin).parent / "tensorflow"
    if not (folder and list(folder.glob("mpi_lib*.so"))):
        pytest.skip("no horovod is built here (build_ops/horovod.sh)")
    run = "import sys, horovod.runner.launch as launch;"
    run += "sys.exit(launch.run_commandline())"
    command = ["-c", run, "-np", str(ranks), sys.executable]
    printed(*command, PROGRAM.with_name("horovod_program.py"), tmp_path)
    assert len(list(tmp_path.iterdir())) == ranks


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
        hosts = launched.slurm_host_names("n[9-11],m1")
    check(found, alone)
    assert hosts == ["n9", "n10", "n11", "m1"]


def printed(*command, **environment):
    """What a program prints that imports from the examples' folder."""
    path = os.pathsep.join([str(CLUSTERS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def losses(text):
    """What ranks have printed: (rows, rank, ranks) to losses of epochs."""
    lines = re.findall(r"rows (\d+), rank (\d) of (\d): \[(.*?)\]", text)
    return {
        (int(rows), int(rank), int(ranks)): [float(x) for x in each.split(",")]
        for rows, rank, ranks, each in lines
    }


def test_spark():
    """Twice in the same processes; by spark-tensorflow-distributor; failing."""
    pytest.importorskip("pyspark", reason="no pyspark is installed")
    pytest.importorskip("spark_tensorflow_distributor")
    if shutil.which("java") is None:
        pytest.skip("Spark needs java, which is not installed")
    mine = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    text = printed(PROGRAM.with_name("spark_program.py"), **mine)
    found = losses(text)
    assert set(found) == {
        (100, 0, 1),
        *((rows, rank, 2) for rows in (100, 200) for rank in range(2)),
    }
    assert text.count("rows 100, rank 0 of 2") == 2  # one by the distributor
    for rank in range(2):
        np.testing.assert_allclose(
            found[100, rank, 2], found[100, 0, 1], rtol=1e-5
        )
        assert found[200, rank, 2] == found[200, 0, 2]


@pytest.mark.parametrize("as_ray_says", [False, True])
def test_ray(tmp_path, as_ray_says):
    """Also with the variable that Ray sets: either Keras will do."""
    pytest.importorskip("ray.train", reason="no ray[train] is installed")
    program = tmp_path / "program.py"
    text = (CLUSTERS / "ray_train.py").read_text()
    trap = 'os.environ.pop("TF_USE_LEGACY_KERAS", None)'
    assert text.count(trap) == 1
    program.write_text(text.replace(trap, "") if as_ray_says else text)
    text = printed(program, RAY_USAGE_STATS_ENABLED="0", HOME=str(tmp_path))
    found = losses(text)
    assert set(found) == {(100, 0, 2), (100, 1, 2)}, text
    first, last = found[100, 0, 2]
    assert found[100, 1, 2] == [first, last] and last < first
    assert as_ray_says or "Keras 3." in text
