# SPDX-License-Identifier: Apache-2.0
"""Every row lives in one place, and load is even."""

import numpy as np
import pytest

from tfdist_ext.tables import placement


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 1000])
def test_every_row_lives_in_one_place(rows, world_size):
    found = np.zeros(rows, int)
    for rank in range(world_size):
        ids = placement.ids_of_part(rank, world_size, rows)
        local_rows = -(-rows // world_size)
        assert local_rows - 1 <= len(ids) <= local_rows
        found[ids] += 1
        assert (placement.part_of(ids, world_size) == rank).all()
        np.testing.assert_array_equal(
            placement.local_row(ids, world_size), np.arange(len(ids))
        )
    assert (found == 1).all()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("stride", [1, 2, 4, 8, 24, 1024])
def test_load_is_even_for_sequences_and_strides(stride, world_size):
    ids = np.arange(0, 20000 * stride, stride)
    load = np.bincount(placement.part_of(ids, world_size))
    assert load.max() < 1.05 * len(ids) / world_size


def test_large_ids():
    ids = np.array([2**40 - 1, 2**40 - 2])
    owners = placement.part_of(ids, 2)
    assert sorted(owners) == [0, 1]
    assert (placement.local_row(ids, 2) == 2**39 - 1).all()
