# SPDX-License-Identifier: Apache-2.0
"""Reader and generator of ratings."""

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from data import files
from data import ratings


def test_read_counts_ids_from_zero(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "u.data"
    path.write_text("196 242 3\t881250949\n186\t302\t1\t891717742\n")
    known = ratings.read(path)
    assert known.users.tolist() == [195, 185]
    assert known.items.tolist() == [241, 301]
    assert known.scores.tolist() == [3.0, 1.0]


@pytest.mark.parametrize("line", ["1 2 3", "0 2 3 4", "1 2 3 4 5"])
def test_other_formats_are_refused(tmp_path: pathlib.Path, line: str) -> None:
    path = tmp_path / "u.data"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="four columns and ids from 1"):
        ratings.read(path)


def make_ratings(count: int) -> ratings.Ratings:
    numbers = np.arange(count)
    return ratings.Ratings(numbers, numbers + 1, numbers.astype(np.float32))


def test_split_is_a_partition_of_the_seed() -> None:
    known = make_ratings(100)
    train, test = ratings.split(known, test=0.2, seed=0)
    assert (len(train), len(test)) == (80, 20)
    both = np.concatenate([train.users, test.users])
    assert sorted(both) == list(range(100))
    np.testing.assert_array_equal(test.items, test.users + 1)
    _, again = ratings.split(known, test=0.2, seed=0)
    np.testing.assert_array_equal(test.users, again.users)


def test_dataset_shuffles_anew_with_the_same_seed() -> None:
    known = make_ratings(50)

    def epochs() -> list[list[int]]:
        batches = known.dataset(10, shuffle=True, seed=5)
        return [
            [user for batch in batches for user in batch["user"].numpy()]
            for _ in range(2)
        ]

    first = epochs()
    assert first == epochs()
    assert first[0] != first[1]
    assert sorted(first[0]) == list(range(50))


def test_generated_ratings(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    known = ratings.read(ratings.synthetic_directory(rows=2000) / "u.data")
    assert len(known) == 2000
    assert set(np.unique(known.scores)) == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert known.users.max() < 500
    assert known.items.max() < 800


def test_real_ratings(real_data: Callable[[str], pathlib.Path]) -> None:
    known = ratings.read(real_data("ml-100k") / "u.data")
    assert len(known) == 100_000
    assert (known.users.max(), known.items.max()) == (942, 1681)
