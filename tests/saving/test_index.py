# SPDX-License-Identifier: Apache-2.0
"""The index of a TensorFlow checkpoint."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist_ext.saving.checkpoint_index import Index

BIG = 1 << 40  # of a table of which only some rows are written


def write(path, name, slice_specs, dtype=tf.int64):
    def values(text):
        *_, extents = text.split(" ")
        lengths = [each.split(",")[-1] for each in extents.split(":")]
        shape = [4 if each == "-" else int(each) for each in lengths]
        return tf.cast(tf.fill(shape, len(text)), dtype)

    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=[name] * len(slice_specs),
        shape_and_slices=slice_specs,
        tensors=list(map(values, slice_specs)),
    )
    return Index(str(path))


@pytest.mark.parametrize("name", ["table", "a/b\N{MICRO SIGN}", "zero\0s"])
def test_slices_are_found_with_their_values(tmp_path, name):
    starts = [0, 63, 64, 8191, 8192, 2**20, 2**27, 2**34 - 1, 2**34, 2**39]
    specs = [f"{BIG} 4 {start},1:0,4" for start in starts]
    specs += [f"{BIG} 4 {2**39 + 2**35},70:-", f"{BIG} 4 {2**38},1:1,2"]
    index = write(tmp_path / "saved", name, specs)
    for spec in specs:
        stored = index.stored(name, spec, tf.int64)
        with open(stored.file, "rb") as file:
            file.seek(stored.offset)
            (rows, columns) = stored.shape
            data = file.read(8 * rows * columns)
        found = tf.io.decode_raw(data, tf.int64).numpy()
        assert found.tolist() == [len(spec)] * (rows * columns)


def test_slices_that_are_not_stored_as_they_are(tmp_path):
    index = write(tmp_path / "saved", "t", ["8 4 0,4:0,4", "8 4 4,4:0,4"])
    assert index.stored("t", "8 4 4,4:0,4", tf.int64).shape == (4, 4)
    assert index.stored("t", "8 4 4,4:-", tf.int64) is None
    assert index.stored("t", "8 4 0,8:0,4", tf.int64) is None
    assert index.stored("t", "8 4 4,4:0,4", tf.float64) is None
    assert index.stored("u", "8 4 4,4:0,4", tf.int64) is None
