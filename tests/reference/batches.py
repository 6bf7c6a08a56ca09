# SPDX-License-Identifier: Apache-2.0
"""`tfdist_ext.ops.collective_ops` made of stock ops."""

import tensorflow as tf


def slice_of_rank(parts, kinds, rank, world_size):
    """See `collective_ops.slice_of_rank`."""
    rest, found = iter(parts), []
    for kind in kinds:
        count = 3 if kind < 0 else 1 + kind
        value = [next(rest) for _ in range(count)]
        if kind < 0:
            found += _sparse(tf.SparseTensor(*value), rank, world_size)
        elif kind:
            ragged = tf.RaggedTensor.from_nested_row_splits(value[0], value[1:])
            cut = ragged[slice(*_samples(ragged.nrows(), rank, world_size))]
            found += [cut.flat_values, *cut.nested_row_splits]
        else:
            size = tf.shape(value[0], tf.int64)[0]
            found.append(value[0][slice(*_samples(size, rank, world_size))])
    return found


def _samples(count, rank, world_size):
    return rank * count // world_size, (rank + 1) * count // world_size


def _sparse(value, rank, world_size):
    start, stop = _samples(value.dense_shape[0], rank, world_size)
    rest = value.dense_shape[1:]
    cut = tf.sparse.slice(
        value,
        tf.concat([[start], tf.zeros_like(rest)], 0),
        tf.concat([[stop - start], rest], 0),
    )
    return [cut.indices, cut.values, cut.dense_shape]
