# SPDX-License-Identifier: Apache-2.0
"""What ranks of a pool may do to themselves, for test_pools.py."""

import os
import signal
import time

import numpy as np
import tensorflow as tf


def used(strategy):
    """The number of this process, and what share of a core it takes idle."""
    start = time.process_time()
    time.sleep(1)
    return os.getpid(), time.process_time() - start


def starts_afresh(strategy):
    """Numbers that are drawn, and the name of a layer, as of a new process."""
    drawn = np.random.normal(), float(tf.random.normal([]))
    return *drawn, tf.keras.layers.Dense(1).name


def fails(strategy):
    if strategy.rank == 1:
        raise ValueError("as it was told to")
    strategy.collectives.barrier("that rank 1 never reaches")


def dies(strategy):
    if strategy.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def hangs(strategy):
    print("about to hang", flush=True)
    if strategy.rank == 1:
        wait_for_ever()


def wait_for_ever():
    time.sleep(1000)
