# SPDX-License-Identifier: Apache-2.0
"""Who carries the messages of the ranks."""

from __future__ import annotations

import importlib
from typing import Any

from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.ops.horovod_ops import HorovodOps

_REMEDY = (
    "Its library must be built for the TensorFlow that is installed: "
    "build_ops/horovod.sh PYTHON does it"
)


def start_horovod(collectives: Collectives) -> None:
    """Lets Horovod carry the messages; all ranks must call this.

    Args:
        collectives: of several ranks, which talk to each other already.

    Raises:
        ImportError: Horovod's library cannot be loaded here.
        RuntimeError: it sees other ranks than we do.
        tf.errors.AbortedError: one of these has come on another rank.
    """
    group = collectives.group
    with collectives.together("load Horovod", all_end=True, own_first=True):
        hvd = _load()
    with collectives.together("start Horovod", all_end=True, own_first=True):
        hvd.init()
        if (hvd.rank(), hvd.size()) != (group.rank, group.world_size):
            raise RuntimeError(
                f"engine='horovod': this is rank {group.rank} of "
                f"{group.world_size}, but rank {hvd.rank()} of {hvd.size()} to "
                "Horovod, which knows ranks that horovodrun has started, or "
                "mpirun if it is built with MPI. Start the program by one of "
                "them, or leave `engine` out."
            )
    collectives.ops = HorovodOps(hvd)


def _load() -> Any:
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:  # also one of TensorFlow, of what it loads
        raise ImportError(
            f"engine='horovod' needs Horovod, which cannot be imported: "
            f"{type(error).__name__}: {error}. {_REMEDY}."
        ) from error
