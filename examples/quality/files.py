# SPDX-License-Identifier: Apache-2.0
"""ml-100k as RecBole ships it: ratings, users and items in text files."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

import numpy as np

_USER_FIELDS = ("age", "gender", "occupation")
_ITEM_FIELD = "release_year"


@dataclasses.dataclass(frozen=True)
class Files:
    """What the files contain, in their order; numbers begin at 0.

    Attributes:
      users: int64 `[ratings]`.
      items: int64 `[ratings]`.
      scores: float32 `[ratings]`, 1 to 5.
      times: int64 `[ratings]`, seconds.
      user_fields: int64 `[users, 3]`: age, gender, occupation.
      item_fields: int64 `[items, 1]`: the year of release.
      genres: int64 `[items, most]`, filled up with -1.
    """

    users: np.ndarray
    items: np.ndarray
    scores: np.ndarray
    times: np.ndarray
    user_fields: np.ndarray
    item_fields: np.ndarray
    genres: np.ndarray

    @property
    def user_count(self) -> int:
        return len(self.user_fields)

    @property
    def item_count(self) -> int:
        return len(self.item_fields)


def find(folder: str | None) -> pathlib.Path | None:
    """The folder with `ml-100k.inter`.

    Args:
      folder: This folder, or None for that of an installed `recbole`, which
        is found without importing it.
    """
    if folder is not None:
        return pathlib.Path(folder)
    spec = importlib.util.find_spec("recbole")
    if spec is None or spec.origin is None:
        return None
    path = pathlib.Path(spec.origin).parent / "dataset_example" / "ml-100k"
    return path if path.is_dir() else None


def read(folder: pathlib.Path) -> Files:
    """Reads `ml-100k.inter`, `ml-100k.user` and `ml-100k.item`."""
    ratings = _columns(folder / "ml-100k.inter")
    users = _columns(folder / "ml-100k.user")
    items = _columns(folder / "ml-100k.item")
    _, of_user = np.unique(users["user_id"].astype(int), return_inverse=True)
    item_ids = items["item_id"].astype(int)
    fields = [
        _numbers(users[name])[np.argsort(of_user)] for name in _USER_FIELDS
    ]
    order = np.argsort(item_ids)
    return Files(
        ratings["user_id"].astype(np.int64) - 1,
        ratings["item_id"].astype(np.int64) - 1,
        ratings["rating"].astype(np.float32),
        ratings["timestamp"].astype(np.int64),
        np.stack(fields, axis=1),
        _numbers(items[_ITEM_FIELD])[order][:, np.newaxis],
        _genres(items["class"][order]),
    )


def _columns(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Columns of a file whose header is `name:type` for each."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    names = [name.partition(":")[0] for name in header.split("\t")]
    rows = [line.split("\t") for line in lines if line]
    wrong = [row for row in rows if len(row) != len(names)]
    if wrong:
        raise ValueError(
            f"Each line of {path} must have the {len(names)} columns of the "
            f"header. Received: {wrong[0]}"
        )
    columns = zip(*rows, strict=True)
    return {
        name: np.array(column)
        for name, column in zip(names, columns, strict=True)
    }


def _numbers(texts: np.ndarray) -> np.ndarray:
    return np.unique(texts, return_inverse=True)[1].astype(np.int64)


def _genres(texts: np.ndarray) -> np.ndarray:
    lists = [text.split() for text in texts]
    names = sorted({name for each in lists for name in each})
    found = np.full([len(lists), max(map(len, lists))], -1, np.int64)
    for row, each in zip(found, lists, strict=True):
        row[: len(each)] = [names.index(name) for name in each]
    return found
