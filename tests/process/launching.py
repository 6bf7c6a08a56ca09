# SPDX-License-Identifier: Apache-2.0
"""Runs a program on several ranks of this machine, with a time limit."""

import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def run_ranks(program, ranks, *arguments, keras=3, timeout=800, **environment):
    """Runs `program` (a file beside this one) with the product's launcher.

    Args:
        program: file name.
        ranks: number of ranks; 1 runs without TF_CONFIG.
        *arguments: of the program.
        keras: 3 or 2 (tf_keras).
        timeout: seconds.
        **environment: more environment variables.

    Returns:
        The finished `subprocess.CompletedProcess`, with exit code 0.
    """
    command = [sys.executable, str(HERE / program), *map(str, arguments)]
    if ranks > 1:
        launcher = ["-m", "tfdist_ext.launch", "-n", str(ranks)]
        command = [sys.executable, *launcher, *command[1:]]
    env = {
        **os.environ,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TF_USE_LEGACY_KERAS": "1" if keras == 2 else "0",
        "PYTHONPATH": str(HERE.parent.parent),
        **environment,
    }
    done = subprocess.run(
        command, env=env, timeout=timeout, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-12000:]
    return done
