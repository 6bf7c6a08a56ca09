# SPDX-License-Identifier: Apache-2.0
"""Files of `Dataset.cache(filename)` that several ranks would write."""

from __future__ import annotations

import json
import pathlib
import socket

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives


def check(dataset: tf.data.Dataset, collectives: Collectives) -> None:
    """Refuses a dataset that ranks of one host cache in one file.

    Each rank reads the whole dataset, and would write all of the file.

    Args:
        dataset: of this rank; all ranks must call.
        collectives: of the strategy.

    Raises:
        ValueError: on all ranks, naming the file and the ranks.
    """
    files = [
        str(pathlib.Path(name).absolute())
        for name in internals.cache_files(dataset)
    ]
    text = json.dumps([socket.gethostname(), files]).encode() + b"\n"
    own = tf.constant(np.frombuffer(text, np.uint8))
    gathered = collectives.all_gather(own, "cache files").numpy().tobytes()
    users: dict[tuple[str, str], list[int]] = {}
    for rank, line in enumerate(gathered.splitlines()):
        host, names = json.loads(line)
        for name in set(names):
            users.setdefault((host, name), []).append(rank)
    for (_, name), ranks in users.items():
        if len(ranks) > 1:
            raise ValueError(
                f"Ranks {ranks} cache a dataset in one file, '{name}', and "
                "each of them would write all of it. Give each rank a file "
                "of its own: `dataset.cache(f'{path}-{strategy.rank}')`. Or "
                "cache in memory: `dataset.cache()`."
            )
