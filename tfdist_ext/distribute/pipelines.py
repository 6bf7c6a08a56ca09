# SPDX-License-Identifier: Apache-2.0
"""What the ranks tell each other of their datasets before they read them.

Their pipelines may differ in what does not change the data.
"""

from __future__ import annotations

import json
import pathlib
import socket
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives


def compare(
    dataset: tf.data.Dataset, may_part: bool, collectives: Collectives
) -> bool:
    """Refuses a dataset that ranks of one host cache in one file.

    Each rank reads the whole dataset, and would write all of the file.

    Args:
        dataset: of this rank; all ranks must call.
        may_part: whether this rank's data may differ from that of others
            after the first batch.
        collectives: of the strategy.

    Returns:
        Whether that of any rank may.

    Raises:
        ValueError: on all ranks, naming the file and the ranks.
    """
    files = [
        str(pathlib.Path(name).absolute())
        for name in internals.cache_files(dataset)
    ]
    told = [socket.gethostname(), files, may_part]
    text = json.dumps(told).encode() + b"\n"
    own = tf.constant(np.frombuffer(text, np.uint8))
    gathered = collectives.all_gather(own, "dataset").numpy().tobytes()
    ranks = [json.loads(line) for line in gathered.splitlines()]
    _check_files([(host, names) for host, names, _ in ranks])
    return any(may for _, _, may in ranks)


def _check_files(of_ranks: Sequence[tuple[str, list[str]]]) -> None:
    users: dict[tuple[str, str], list[int]] = {}
    for rank, (host, names) in enumerate(of_ranks):
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
