# SPDX-License-Identifier: Apache-2.0
"""Parts for training, validation and test, as the published figures have."""

from __future__ import annotations

import numpy as np

# Positions of the ratings of each part.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]


def at_random(count: int, seed: int) -> Parts:
    """RecBole's split of all ratings at random, 8:1:1."""
    order = np.random.default_rng(seed).permutation(count)
    tenth = count // 10
    train, valid, test = np.split(order, [count - 2 * tenth, count - tenth])
    return train, valid, test


def of_users(users: np.ndarray, seed: int) -> Parts:
    """RecBole's split of each user's ratings at random, 8:1:1.

    A user with fewer than ten ratings has one each for validation and test.
    """
    rng = np.random.default_rng(seed)
    parts: tuple[list[np.ndarray], ...] = ([], [], [])
    for positions in by_user(users):
        own = rng.permutation(positions)
        held_out = max(len(own) // 10, 1)
        cuts = [len(own) - 2 * held_out, len(own) - held_out]
        for part, chosen in zip(parts, np.split(own, cuts), strict=True):
            part.append(chosen)
    train, valid, test = map(np.concatenate, parts)
    return train, valid, test


def by_user(users: np.ndarray) -> list[np.ndarray]:
    """Positions of the ratings of each user, in order."""
    order = np.argsort(users, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(users[order])) + 1)


def histories(
    users: np.ndarray, items: np.ndarray, times: np.ndarray
) -> list[np.ndarray]:
    """Items of each user, the oldest first; equal times in the file's order.

    The last one is for the test, the one before for validation.
    """
    order = np.argsort(times, kind="stable")
    users, items = users[order], items[order]
    return [items[positions] for positions in by_user(users)]


def random_folds(count: int, folds: int, seed: int) -> list[np.ndarray]:
    """Positions of the test part of each fold, at random."""
    order = np.random.default_rng(seed).permutation(count)
    return np.array_split(order, folds)


def published_folds(count: int, folds: int) -> list[np.ndarray]:
    """The folds u1 to u5 of ml-100k: its lines, in consecutive parts.

    This is what `mku.sh` of ml-100k does with `u.data`, whose order
    `ml-100k.inter` has.
    """
    return np.array_split(np.arange(count), folds)
