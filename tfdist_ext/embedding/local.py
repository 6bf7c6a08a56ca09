# SPDX-License-Identifier: Apache-2.0
"""Tables that lie on a rank whole: looked up without an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.batches.ids import Ids
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.input_dist import OwnedIds
from tfdist_ext.embedding.input_dist import join_lists
from tfdist_ext.embedding.lookup import lookup
from tfdist_ext.ops import id_ops


def local_lookup(
    ids: Sequence[Sequence[Ids]],
    features: Sequence[Feature],
    tables: Sequence[Any],
) -> list[tf.Tensor]:
    """Sums the rows of every sample and feature.

    Args:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in.
        tables: variables, whole.

    Returns:
        Per feature float32 `[b, dim]`.
    """
    owned = _merge(ids, features)
    values, _ = lookup(tables, features, owned)
    return _split(values, owned, features)


def _merge(
    ids: Sequence[Sequence[Ids]], features: Sequence[Feature]
) -> OwnedIds:
    """Ids of tables that lie on this rank whole: checked, no exchange.

    Args:
        ids: per feature, the lists whose results are summed.
        features: what they are looked up in.
    """
    merged = [
        id_ops.merge_ids(
            [part.values for part in lists],
            [part.row_splits for part in lists],
            [part.weights for part in lists],
            vocabulary_size=feature.spec.rows,
            out_of_range=feature.out_of_range,
            layer=feature.name,
        )
        for lists, feature in zip(ids, features, strict=True)
    ]
    lists = [Ids(rows, splits, weights) for splits, rows, weights in merged]
    served = [tf.size(each.row_splits, tf.int64) - 1 for each in lists]
    joined = join_lists(lists)
    return OwnedIds(
        joined.row_splits,
        joined.values,
        joined.weights,
        tf.stack(served)[tf.newaxis],
    )


def _split(
    values: tf.Tensor, ids: OwnedIds, features: Sequence[Feature]
) -> list[tf.Tensor]:
    """One process: the results of each feature, no exchange.

    Args:
        values: float32 `[v]`, from `lookup`.
        ids: what was looked up.
        features: what the results are of.

    Returns:
        Per feature float32 `[b, dim]`.
    """
    dims = [feature.spec.dim for feature in features]
    if len(dims) == 1:
        return [tf.reshape(values, [-1, dims[0]])]
    sizes = ids.served[0] * tf.constant(dims, tf.int64)
    parts = tf.split(values, sizes, num=len(dims))
    return [
        tf.reshape(part, [-1, dim])
        for part, dim in zip(parts, dims, strict=True)
    ]
