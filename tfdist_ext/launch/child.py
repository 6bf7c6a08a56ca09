# SPDX-License-Identifier: Apache-2.0
"""Sets up a process that a launcher has started, and becomes its program.

    python -S child.py PID PROGRAM [ARGUMENT ...]

PID is that of the launcher. `local_ranks.popen` runs this file as a script: a
launcher with threads must not run Python between fork and exec, where a lock
may be held for ever. Nothing but the standard library is imported, to be quick.
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
    if os.getppid() != int(launcher):  # It died before the line above.
        os._exit(1)
    # SIGINT is ignored where a script has started the launcher in the
    # background; in a session of its own, this process gets it from the
    # launcher only. Python itself ignores the other two.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # Blocked by the launcher, which fetches them.
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK,
        {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD},
    )
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
