# SPDX-License-Identifier: Apache-2.0
"""Stands for a program that runs in a process forked by `server.py`.

Usage: enter.py PROGRAM ARGUMENT...

It has the input, output and environment of this process, ends with it, and
this process ends as it does. The environment's TFDIST_TEST_SERVERS is the
folder of the servers' sockets; TFDIST_TEST_PID may name a file for the number
of the process, for signals that this one cannot pass on.
"""

import json
import os
import pathlib
import signal
import socket
import sys


def server() -> str:
    """The socket of the server to ask.

    Neighbouring ranks are forked by different servers: each has a seed of its
    own for the order in sets of strings, as ranks that are not forked.
    """
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    rank = config["task"]["index"] if config else 0
    keras = 2 if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else 3
    return f"{os.environ['TFDIST_TEST_SERVERS']}/keras{keras}-{rank % 2}"


def main() -> None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server())
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
    }
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    pid = int(connection.recv(64))
    if "TFDIST_TEST_PID" in os.environ:
        pathlib.Path(os.environ["TFDIST_TEST_PID"]).write_text(f"{pid}")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.killpg(pid, number))
    status = os.waitstatus_to_exitcode(int(connection.recv(64)))
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
