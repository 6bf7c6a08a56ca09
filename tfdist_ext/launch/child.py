# SPDX-License-Identifier: Apache-2.0
"""Sets up a process that a launcher has started, and runs its program.

    python -S child.py PID PROGRAM [ARGUMENT ...]

PID is the process id of the launcher. `local_ranks.popen` runs this file as a
script: a launcher with threads must not run Python between fork and exec, where
another thread's lock may never be released. Only the standard library is
imported, for a fast start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Sets up this process; then runs the program in it."""
    launcher, *command = sys.argv[1:]
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # the launcher has already ended
        os._exit(1)
    # SIGINT is ignored if a script started the launcher in the background. This
    # process is in a session of its own and gets SIGINT only from the launcher.
    # Python itself ignores the other two.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # The launcher has blocked these, as it waits for them.
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK,
        {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD},
    )
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
