# SPDX-License-Identifier: Apache-2.0
"""Lets the random generators of all ranks go on alike from the start.

Every rank shuffles the same dataset and keeps its slice of each batch, so the
shuffles must agree: those of TensorFlow, and those that a program makes with
Python's or NumPy's generator before it hands the data over.
"""

from __future__ import annotations

import json
import random
import secrets
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.collectives.collectives import Collectives


def share(collectives: Collectives) -> None:
    """Gives all ranks the seed and the generators' states of rank 0.

    A rank that has called `tf.random.set_seed` keeps its seed. Python's and
    NumPy's generators do not know whether they were seeded: their states are
    taken over from rank 0, which changes nothing where all ranks have seeded
    them alike, and nothing on rank 0.
    """
    first = collectives.group.rank == 0
    mine: dict[str, Any] = {"seed": internals.global_seed()}
    if first:
        if mine["seed"] is None:
            # Nobody can guess it, nor what is derived from it.
            mine["seed"] = secrets.randbits(128)
        mine["python"] = random.getstate()
        mine["numpy"] = _numpy_state()
    text = json.dumps(mine) + "\n"
    gathered = collectives.all_gather(
        tf.constant(np.frombuffer(text.encode(), np.uint8)), "seeds"
    )
    ranks = [
        json.loads(line) for line in gathered.numpy().tobytes().splitlines()
    ]
    if not first:
        version, words, gauss = ranks[0]["python"]
        random.setstate((version, tuple(words), gauss))
        if ranks[0]["numpy"]["bit_generator"] == _bit_generator():
            np.random.set_state(ranks[0]["numpy"])
    if internals.global_seed() is None:
        tf.random.set_seed(ranks[0]["seed"])
    _warn_if_they_differ([rank["seed"] for rank in ranks])


def _bit_generator() -> str:
    return str(np.random.get_state(legacy=False)["bit_generator"])


def _numpy_state() -> dict[str, Any]:
    """The state of NumPy's global generator as JSON can hold it."""
    state: Any = np.random.get_state(legacy=False)
    inner = {
        field: value.tolist() if isinstance(value, np.ndarray) else value
        for field, value in state["state"].items()
    }
    return {**state, "state": inner}


def _warn_if_they_differ(seeds: list[int | None]) -> None:
    if any(seed not in (None, seeds[0]) for seed in seeds):
        tf.get_logger().warning(
            "The ranks use different seeds (%s), so they shuffle datasets "
            "differently and some samples are trained twice, others never. "
            "Call tf.random.set_seed with the same seed on every rank.",
            seeds,
        )
