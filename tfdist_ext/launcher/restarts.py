# SPDX-License-Identifier: Apache-2.0
"""Starts a job again after a failure: `tfdist-run --max-restarts`.

All ranks of a host are ended and started anew, as processes: what a failed
rank has left in TensorFlow, or a driver, is gone with it. Hosts meet again
before each start, or are reached again by ssh; those that do not come are left
out, if enough ranks are.
"""

from __future__ import annotations

import argparse
import copy
import pathlib
import sys
from collections.abc import Callable

from tfdist_ext.launcher.local_ranks import Ended

# Which start of the job it is, for the ranks; 0 is the first.
VARIABLE = "TFDIST_RESTART"

Attempt = Callable[[argparse.Namespace], Ended]


def run(options: argparse.Namespace, attempt: Attempt) -> int:
    """Runs a job until it has succeeded, was stopped, or fails too often.

    Args:
        options: of the command line.
        attempt: runs all ranks of this host once, with options like these.

    Returns:
        The exit code of the last run.
    """
    restarts = 0
    while True:
        ended = attempt(_options_of(options, restarts))
        if ended.code == 0 or ended.told or restarts >= options.max_restarts:
            return ended.code
        restarts += 1
        print(
            f"tfdist-run: starts again ({restarts} of {options.max_restarts} "
            "restarts)",
            file=sys.stderr,
            flush=True,
        )


def _options_of(
    options: argparse.Namespace, restarts: int
) -> argparse.Namespace:
    """Those of one start: its number for the ranks, and logs of its own."""
    own = copy.copy(options)
    own.restarts = restarts
    own.env = [(VARIABLE, str(restarts)), *options.env]
    if restarts:
        # Hosts come when their ranks have ended; host 0 waits for them, and
        # they for it and those that it waits for.
        waits = options.restart_timeout + options.grace
        own.start_timeout = waits if options.node_rank == 0 else 2 * waits
        if options.hosts:  # the connections have ended
            own.start_timeout = options.restart_timeout
        if options.log_dir is not None:
            own.log_dir = pathlib.Path(options.log_dir, f"restart-{restarts}")
    return own
