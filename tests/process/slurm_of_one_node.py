# SPDX-License-Identifier: Apache-2.0
"""A Slurm of this machine alone, with its daemons in a folder of its own."""

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
_SECONDS = 60.0
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """What is missing; empty if it can be started."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    return "" if os.geteuid() == 0 else "its daemons need root"


@contextlib.contextmanager
def started(folder: pathlib.Path) -> Iterator[dict[str, str]]:
    """Starts Slurm and stops it at the end.

    Args:
        folder: empty; for its files.

    Yields:
        The environment for its commands.
    """
    folder.chmod(0o755)  # munge wants its socket in a folder for all
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().partition(".")[0]
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, host=host, ports=_free_ports(2))
    )
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    commands = [
        [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.sock",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        ],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
    ]
    with contextlib.ExitStack() as stack:
        for command in commands:
            daemon = subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            stack.callback(_stop, daemon)
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.sock").exists(), folder)
        _wait(lambda: _is_idle(environment), folder)
        yield environment


def _stop(daemon: "subprocess.Popen[bytes]") -> None:
    daemon.terminate()
    try:
        daemon.wait(10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _is_idle(environment: dict[str, str]) -> bool:
    states = subprocess.run(
        ["sinfo", "--noheader", "--format=%T"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return states.stdout.strip() == "idle"


def _wait(done, folder: pathlib.Path) -> None:
    deadline = time.monotonic() + _SECONDS
    while not done():
        logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
        assert time.monotonic() < deadline, "\n".join(logs)
        time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            for _ in range(count)
        ]
        return [server.getsockname()[1] for server in servers]
