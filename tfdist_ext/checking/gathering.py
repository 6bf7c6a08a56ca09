# SPDX-License-Identifier: Apache-2.0
"""The whole batch of a step, on every rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_ext.checking.skipping import CannotCheck
from tfdist_ext.collectives import any_dtype
from tfdist_ext.collectives.collectives import Collectives

Nest = Any


def whole_batch_of(batch: Nest, collectives: Collectives) -> Nest:
    """The ranks' batches one after the other; all ranks must call.

    Args:
        batch: of this rank: tensors, ragged and sparse ones, in any nest.
        collectives: of the strategy.

    Returns:
        The same nest of the samples of all ranks, in the order of the ranks.

    Raises:
        CannotCheck: for a batch with something that cannot be gathered.
    """
    flat = tf.nest.flatten(batch)
    gathered = [_gather(value, i, collectives) for i, value in enumerate(flat)]
    return tf.nest.pack_sequence_as(batch, gathered)


def signature_of(batch: Nest) -> Nest:
    """Type specs of a batch, of any number of samples.

    Args:
        batch: as `whole_batch_of` returns it.
    """
    return tf.nest.map_structure(_open_spec, batch)


def _open_spec(value: Any) -> Any:
    if value is None:
        return None
    spec = tf.type_spec_from_value(value)
    if isinstance(value, tf.experimental.Optional) or spec.shape.rank == 0:
        return spec
    shape = [None, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return type(spec)(shape, spec.dtype)


def _gather(value: Any, index: int, collectives: Collectives) -> Any:
    label = f"check/batch/{index}"
    # What is missing; in a dataset of Keras 3 it is an Optional.
    if value is None or isinstance(value, tf.experimental.Optional):
        return value
    if not tf.is_tensor(value) or not hasattr(value, "dtype"):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__}, "
            "which cannot be gathered"
        )
    if value.shape.rank == 0:
        return value
    kinds = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)
    if not isinstance(value, kinds) or not any_dtype.is_known(value.dtype):
        raise CannotCheck(
            f"element {index} of the batch is of {type(value).__name__} of "
            f"{value.dtype!r}, which cannot be gathered"
        )
    return any_dtype.all_gather_rows(collectives, value, label)[0]
