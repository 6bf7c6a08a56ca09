# SPDX-License-Identifier: Apache-2.0
"""Criteo-like click logs whose true click probability is known."""

import pathlib
from collections.abc import Iterator

import numpy as np

from data.files import demo_directory
from data.files import write_once

NUM_INTEGERS = 13
# Values per category: a few as small as weekdays, a few as large as users.
VOCABULARY = (
    *(1000, 500, 20000, 5000, 200, 20, 5000, 500, 3, 10000, 3000, 20000, 2000),
    *(26, 5000, 10000, 10, 3000, 1500, 4, 20000, 15, 14, 8000, 80, 4000),
)
MISSING_INTEGER = 0.2
MISSING_CATEGORY = 0.05
_CHUNK = 10_000


def click_log(rows: int, seed: int = 0) -> pathlib.Path:
    """Path of a generated file, written by the first call that asks for it."""
    path = demo_directory() / f"criteo-like-{rows}-{seed}.tsv"
    return write_once(path, (line for line, _ in samples(rows, seed)))


def samples(rows: int, seed: int = 0) -> Iterator[tuple[str, float]]:
    """Yields lines in the Criteo format and the click probability of each.

    The log-odds of a click are a weight for every category value, a slope for
    the logarithm of every integer, and one product of two hidden traits. The
    same `seed` gives the same lines on every machine.
    """
    rng = np.random.default_rng(seed)
    weights = [rng.normal(0.0, 0.9 * size**-0.2, size) for size in VOCABULARY]
    traits = [rng.normal(0.0, 0.5, size) for size in VOCABULARY[:2]]
    slopes = rng.normal(0.0, 0.15, NUM_INTEGERS)
    for start in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - start)
        integers, logs = _draw_integers(rng, count)
        values, present = _draw_categories(rng, count)
        log_odds = -1.4 + logs @ slopes
        for column, weight in enumerate(weights):
            log_odds += weight[values[:, column]] * present[:, column]
        log_odds += traits[0][values[:, 0]] * traits[1][values[:, 1]]
        clicks = 1.0 / (1.0 + np.exp(-log_odds))
        labels = (rng.random(count) < clicks).astype(np.int64).astype(str)
        table = np.column_stack([labels, integers, _names(values, present)])
        lines = map("\t".join, table.tolist())
        yield from zip(lines, clicks.tolist(), strict=True)


def _draw_integers(
    rng: np.random.Generator, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Counts with a long tail: their text, and log1p centred on 0."""
    centre = np.linspace(0.5, 5.0, NUM_INTEGERS)
    logs = rng.normal(centre, 1.2, (count, NUM_INTEGERS))
    integers = np.floor(np.exp(logs)).astype(np.int64)
    missing = rng.random(integers.shape) < MISSING_INTEGER
    centred = np.where(missing, 0.0, np.log1p(integers) - centre)
    return np.where(missing, "", integers.astype(str)), centred


def _draw_categories(
    rng: np.random.Generator, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Value numbers, the k-th drawn with a probability close to 1 / k."""
    shape = (count, len(VOCABULARY))
    sizes = np.array(VOCABULARY, np.float64)
    values = np.floor(sizes ** rng.random(shape)).astype(np.int64) - 1
    return values, rng.random(shape) >= MISSING_CATEGORY


def _names(values: np.ndarray, present: np.ndarray) -> np.ndarray:
    """Eight hexadecimal digits for each value, the empty text if missing."""
    columns = []
    for column, size in enumerate(VOCABULARY):
        keys = np.arange(size) * len(VOCABULARY) + column + 1
        names = [f"{key * 2654435761 % 2**32:08x}" for key in keys.tolist()]
        columns.append(np.array(names)[values[:, column]])
    return np.where(present, np.column_stack(columns), "")
