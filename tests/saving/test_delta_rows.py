# SPDX-License-Identifier: Apache-2.0
"""Rows that have changed, put into what a full checkpoint had."""

import os

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.saving import changed_rows


def test_rows_come_to_where_they_belong(tmp_path):
    """Of two ranks with columns each, into slices of other ranks."""
    path = str(tmp_path / "delta")
    left, right = np.ones([3, 2], np.float32), np.full([1, 2], 2, np.float32)
    entries = changed_rows.delta_entries(
        "t", 0, np.array([1, 4, 8]), (0, 2), left
    )
    entries += changed_rows.delta_entries("t", 1, np.array([4]), (2, 4), right)
    names, slices, values = zip(*entries, strict=True)
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=names,
        shape_and_slices=slices,
        tensors=values,
    )
    delta = changed_rows.DeltaRows(path)
    assert delta.keys == {"t"}
    found = delta.put_into("t", "10 4 4,5:1,3", tf.zeros([5, 3])).numpy()
    expected = np.zeros([5, 3], np.float32)
    expected[0] = [1, 2, 2]
    expected[4] = [1, 0, 0]
    np.testing.assert_array_equal(found, expected)
    whole = delta.put_into("t", "", tf.zeros([10, 4])).numpy()
    np.testing.assert_array_equal(np.flatnonzero(whole.any(1)), [1, 4, 8])
    # What is too short is torn as well as what has another checksum.
    os.truncate(f"{path}.data-00000-of-00001", 12)
    with pytest.raises(tf.errors.DataLossError, match=path):
        changed_rows.DeltaRows(path).put_into("t", "", tf.zeros([10, 4]))
