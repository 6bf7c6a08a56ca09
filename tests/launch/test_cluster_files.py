# SPDX-License-Identifier: Apache-2.0
"""The files of examples/clusters start ranks that know each other.

What a container of them is to run is run here, in the environment that the
operator would set; mpirun and sbatch are the real ones, where they are.
"""

import json
import os
import pathlib
import shutil
import socket
import stat
import subprocess
import sys

import pytest
import yaml

from tests.launch.launcher import LIMIT
from tests.launch.launcher import environment
from tests.process import slurm_of_one_node

FILES = pathlib.Path(__file__).parents[2] / "examples" / "clusters"
PROGRAM = """
import json, os
from tfdist_ext.launch import launched

config = json.loads(os.environ.get("TF_CONFIG", "null"))
found = launched.read(os.environ) if config is None else None
place = found and [found.rank, found.size, found.master]
print("=", json.dumps(place or [config["task"], config["cluster"]]), flush=True)
"""


@pytest.fixture
def run(tmp_path):
    """Starts a command as a container would; the process."""
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "tfdist-run"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -m tfdist_ext.launch "$@"\n'
    )
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    path = f"{folder}:{os.environ['PATH']}"
    root = str(FILES.parents[1])

    def start(words, **variables):
        words = [word.replace("/app/train.py", str(program)) for word in words]
        return subprocess.Popen(
            words,
            env=environment(PATH=path, PYTHONPATH=root, **variables),
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )

    return start


def said(*processes):
    """What ranks have printed, sorted."""
    texts = [process.communicate(timeout=LIMIT)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), texts
    return read("".join(texts))


def read(text):
    """What ranks have printed, sorted."""
    parts = [line.partition("= ")[2] for line in text.splitlines()]
    return sorted((json.loads(part) for part in parts if part), key=str)


def job(name, *path):
    """The job that a file describes, and what is at a path in it."""
    documents = list(yaml.safe_load_all((FILES / name).read_text()))
    found = documents[-1]["spec"]
    for key in path:
        found = found[key]
    return documents[-1], found


def given(container):
    """Variables whose value is in the file."""
    variables = container["env"]
    assert [each["name"] for each in variables][-1] == "TFDIST_SECRET"
    return {v["name"]: v["value"] for v in variables if "value" in v}


def test_tfjob(run) -> None:
    _, worker = job("tfjob.yaml", "tfReplicaSpecs", "Worker")
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow"
    (port,) = container["ports"]
    assert port == {"name": "tfjob-port", "containerPort": 2222}
    workers = [
        f"train-worker-{rank}.default.svc:2222"
        for rank in range(worker["replicas"])
    ]
    configs = [
        {
            "cluster": {"worker": workers},
            "task": {"type": "worker", "index": rank},
            "environment": "cloud",
        }
        for rank in range(2)
    ]
    processes = [
        run(container["command"], TF_CONFIG=json.dumps(config))
        for config in configs
    ]
    found = [said(process)[0] for process in processes]
    assert found == [[each["task"], each["cluster"]] for each in configs]


def test_trainjob(run) -> None:
    _, trainer = job("trainjob.yaml", "trainer")
    assert given(trainer) == {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = [
        run(
            [*trainer["command"], *trainer["args"]],
            PET_NNODES=str(trainer["numNodes"]),
            PET_NPROC_PER_NODE="auto",
            PET_NODE_RANK=str(node),
            PET_MASTER_ADDR="127.0.0.1",
            PET_MASTER_PORT=str(port),
            JOB_COMPLETION_INDEX=str(node),
            TFDIST_SECRET="s",
        )
        for node in range(2)
    ]
    places = said(*processes)
    assert [place[0]["index"] for place in places] == [0, 1, 2, 3]
    assert all(place[1] == places[0][1] for place in places)


def test_indexed_job(run) -> None:
    document, spec = job("indexed_job.yaml")
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["completionMode"] == "Indexed"
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    variables = given(container)
    name = document["metadata"]["name"]
    assert variables["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert variables["WORLD_SIZE"] == str(spec["completions"])
    processes = [
        run(container["command"], JOB_COMPLETION_INDEX=str(rank), **variables)
        for rank in range(2)
    ]
    assert said(*processes) == [
        [rank, 2, "train-0.train:29500"] for rank in range(2)
    ]


def test_mpijob(run) -> None:
    _, replicas = job("mpijob.yaml", "mpiReplicaSpecs")
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    command = container["command"]
    ranks = int(command[command.index("-n") + 1])
    _, slots = job("mpijob.yaml", "slotsPerWorker")
    assert ranks == slots * replicas["Worker"]["replicas"]
    variables = given(container)
    assert all(name in command for name in (*variables, "TFDIST_SECRET"))
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("no Open MPI is installed")
    command = ["mpirun.openmpi", "--oversubscribe", *command[1:]]
    found = said(run(command, TFDIST_SECRET="s", **variables))
    assert [place[:2] for place in found] == [[rank, 4] for rank in range(4)]
    (master,) = {place[2] for place in found}
    assert master.startswith("train-worker-0.train:")


def test_a_batch_script_of_slurm(run, tmp_path) -> None:
    script = FILES / "slurm.sbatch"
    checked = subprocess.run(["bash", "-n", str(script)], check=False)
    assert checked.returncode == 0
    if why := slurm_of_one_node.why_not():
        pytest.skip(why)
    (tmp_path / "slurm").mkdir()
    with slurm_of_one_node.started(tmp_path / "slurm") as variables:
        options = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1"]
        output = tmp_path / "output"
        words = ["sbatch", "--wait", f"--output={output}", *options]
        configuration = {"SLURM_CONF": variables["SLURM_CONF"]}
        words += [str(script), "/app/train.py"]
        code = run(words, **configuration).wait(LIMIT)
    text = output.read_text()
    assert code == 0, text
    assert [place[:2] for place in read(text)] == [[0, 2], [1, 2]], text
