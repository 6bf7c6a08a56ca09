# SPDX-License-Identifier: Apache-2.0
"""A path holds the old checkpoint or the new one, whatever happens."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.saving import checkpoint_index
from tfdist_ext.saving import checkpoint_writing


def write(prefix, values, count):
    """A checkpoint of `count` data files."""
    parts = []
    for number, piece in enumerate(np.array_split(values, count)):
        parts.append(f"{prefix}_parts/{number}")
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=[f"part {number}"],
            shape_and_slices=[""],
            tensors=[tf.constant(piece)],
        )
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=prefix
    )


def read(prefix):
    reader = tf.train.load_checkpoint(prefix)
    names = sorted(reader.get_variable_to_shape_map())
    return np.concatenate([reader.get_tensor(name) for name in names])


@pytest.mark.parametrize("count", [1, 2, 127, 128, 300])
def test_data_files_are_counted(tmp_path, count):
    prefix = str(tmp_path / "path")
    assert checkpoint_index.data_files_in_use(prefix) == 0
    write(prefix, np.arange(300), count)
    assert checkpoint_index.data_files_in_use(prefix) == count


@pytest.mark.parametrize("steps", range(7))
def test_a_crash_leaves_the_old_or_the_new(tmp_path, monkeypatch, steps):
    """The process ends before the n-th change of a file's name."""
    prefix, merged = str(tmp_path / "path"), str(tmp_path / "merged")
    old, new = np.arange(8), np.arange(8) + 100
    write(prefix, old, 2)
    write(merged, new, 3)
    left = [steps]

    def or_crash(change):
        def changed(*args, **kwargs):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            change(*args, **kwargs)

        return changed

    gfile = checkpoint_writing.gfile
    with monkeypatch.context() as patch:
        for name in ("rename", "remove"):
            patch.setattr(gfile, name, or_crash(getattr(gfile, name)))
        try:
            checkpoint_writing.place(merged, prefix)
            assert steps == 6
        except KeyboardInterrupt:
            assert steps < 6
    # Three data files, the index, then two old data files.
    np.testing.assert_array_equal(read(prefix), new if steps >= 4 else old)
    # The next save is not disturbed by what is left.
    count = checkpoint_index.data_files_in_use(prefix) + 1
    write(merged, new + 1, count)
    checkpoint_writing.place(merged, prefix)
    np.testing.assert_array_equal(read(prefix), new + 1)
    files = sorted(p.name for p in tmp_path.glob("path.*"))
    assert len(files) == 1 + count, files
