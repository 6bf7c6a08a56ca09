# SPDX-License-Identifier: Apache-2.0
"""Ranks of other launchers share a host's GPUs and cores."""

import os

import pytest
import tensorflow as tf

from tfdist_ext.launch.launched import Launched
from tfdist_ext.strategy import bootstrap


class Host:
    """What TensorFlow sees of a host, and what is chosen of it."""

    def __init__(self, patch):
        self.gpus, self.visible, self.threads = ["a", "b"], None, 0
        self.bound, self.started = 8, False
        patch.delenv("TF_NUM_INTRAOP_THREADS", raising=False)
        patch.setattr(os, "cpu_count", lambda: 8)
        patch.setattr(os, "sched_getaffinity", lambda _: range(self.bound))
        config, threading = tf.config, tf.config.threading
        patch.setattr(config, "list_physical_devices", lambda _: self.gpus)
        patch.setattr(
            config, "get_visible_devices", lambda _: self.visible or self.gpus
        )
        patch.setattr(config, "set_visible_devices", self.show)
        name = "intra_op_parallelism_threads"
        patch.setattr(threading, f"get_{name}", lambda: self.threads)
        patch.setattr(threading, f"set_{name}", self.set_threads)

    def show(self, gpu, kind):
        if self.started:
            raise RuntimeError("cannot be modified")
        assert kind == "GPU"
        self.visible = [gpu]

    def set_threads(self, number):
        self.threads = number


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


def take(local_rank, local_size):
    bootstrap.take_share_of_host(
        Launched("srun", 9, 11, local_rank, local_size, "n9:1", "7.0", "")
    )


def test_ranks_of_a_host_take_a_gpu_and_a_share_of_the_cores(host):
    take(1, 2)
    assert (host.visible, host.threads) == (["b"], 4)


@pytest.mark.parametrize("size", [1, 3, 11])
def test_too_few_gpus_are_left_to_all(host, size):
    take(0, size)
    assert host.visible is None
    assert host.threads == {1: 0, 3: 2, 11: 1}[size]


def test_what_somebody_has_chosen_stays(host, monkeypatch):
    host.visible, host.threads = ["a"], 3
    take(1, 2)
    assert (host.visible, host.threads) == (["a"], 3)
    host.threads, host.bound = 0, 4  # bound by the launcher
    take(1, 2)
    assert host.threads == 0
    host.bound = 8
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "5")
    take(1, 2)
    assert host.threads == 0


def test_it_is_said_when_it_is_too_late(host, caplog):
    host.started = True
    take(1, 2)
    assert "cannot take its share" in caplog.text
    assert "before the first tensor" in caplog.text
