# SPDX-License-Identifier: Apache-2.0
"""`tfdist_ext.ops.collective_ops` made of stock ops."""

import tensorflow as tf


def slice_of_rank(parts, kinds, rank, world_size, rows=None):
    """See `collective_ops.slice_of_rank`."""
    rest, found = iter(parts), []
    where = (rank, world_size) if rows is None else tuple(rows.numpy())
    samples = _samples if rows is None else _given
    for kind in kinds:
        count = 3 if kind < 0 else 1 + kind
        value = [next(rest) for _ in range(count)]
        if kind < 0:
            found += _sparse(tf.SparseTensor(*value), samples, where)
        elif kind:
            ragged = tf.RaggedTensor.from_nested_row_splits(value[0], value[1:])
            cut = ragged[slice(*samples(ragged.nrows(), *where))]
            found += [cut.flat_values, *cut.nested_row_splits]
        else:
            size = tf.shape(value[0], tf.int64)[0]
            found.append(value[0][slice(*samples(size, *where))])
    return found


def _samples(count, rank, world_size):
    return rank * count // world_size, (rank + 1) * count // world_size


def _given(count, start, stop):
    return start, stop


def _sparse(value, samples, where):
    start, stop = samples(value.dense_shape[0], *where)
    rest = value.dense_shape[1:]
    cut = tf.sparse.slice(
        value,
        tf.concat([[start], tf.zeros_like(rest)], 0),
        tf.concat([[stop - start], rest], 0),
    )
    return [cut.indices, cut.values, cut.dense_shape]
