# SPDX-License-Identifier: Apache-2.0
"""Reader of histories."""

import pathlib

import numpy as np
from data import histories


def known(folder: pathlib.Path) -> histories.Histories:
    path = folder / "u.data"
    lines = ("7 3 5 20", "2 9 1 5", "7 4 1 10", "7 5 2 30", "7 6 2 40")
    path.write_text("\n".join(lines))
    return histories.read(path, length=2)


def test_histories_are_in_order_and_filled(tmp_path: pathlib.Path) -> None:
    found = known(tmp_path)
    assert found.items.tolist() == [[0, 0, 0, 9], [4, 3, 5, 6]]
    assert found.count == 10


def test_the_last_item_is_for_the_test(tmp_path: pathlib.Path) -> None:
    found = known(tmp_path)
    batches = list(found.train(2, seed=0).take(2).as_numpy_iterator())
    for columns, labels in batches:
        rows = sorted(map(tuple, columns["history"].tolist()))
        assert rows == [(0, 0), (4, 3)]
        positive = sorted(map(tuple, columns["positive"].tolist()))
        assert positive == [(0, 0), (3, 5)]
        assert labels[0].tolist() == [[1, 0], [1, 0]]
    first, second = (columns["negative"] for columns, _ in batches)
    assert first.min() >= 1 and not np.array_equal(first, second)
    (columns,) = found.test(2, seed=0).as_numpy_iterator()
    assert columns["history"].tolist() == [[0, 0], [3, 5]]
    assert columns["candidates"][:, 0].tolist() == [9, 6]
    assert columns["candidates"].shape == (2, 1 + histories.OTHERS)
