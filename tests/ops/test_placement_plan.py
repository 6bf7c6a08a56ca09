# SPDX-License-Identifier: Apache-2.0
"""Where tables lie, as four ops read it: one parser, one set of errors."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext.ops.id_ops import placement_attributes
from tfdist_ext.ops.library import library
from tfdist_ext.tables.placement import FeaturePlacement

GRID = FeaturePlacement("grid", 9, 4, 2, 2, (3, 0, 2, 1))
TABLE = FeaturePlacement("table", 5, 3, 1, 1, (1,))
GOOD = placement_attributes([GRID, TABLE], 4)
IDS = tf.zeros([0], tf.int64)
SPLITS = tf.zeros([1], tf.int64)
WEIGHTS = tf.zeros([0])


def encode(rank=0, **attributes):
    return library().tfdist_encode_ids(
        [IDS, IDS],
        [SPLITS, SPLITS],
        [WEIGHTS, WEIGHTS],
        1.0,
        rank=rank,
        list_features=[0, 1],
        out_of_range=["error"] * 2,
        unique=[False] * 2,
        **attributes,
    )


def decode(rank=0, **attributes):
    encoded = [encode(each, **GOOD) for each in range(4)]
    sizes = [each.send_splits.numpy() for each in encoded]
    parts = [
        each.payload[: size[0]]
        for each, size in zip(encoded, sizes, strict=True)
    ]
    return library().tfdist_decode_ids(
        tf.concat(parts, 0),
        [size[0] for size in sizes],
        rank=rank,
        **attributes,
    )


def combine(**attributes):
    return library().tfdist_combine(
        WEIGHTS, [], np.zeros([4, 2], np.int64), [3, 2], 1.0, F=2, **attributes
    )


def combine_grad(**attributes):
    return library().tfdist_combine_grad(
        [tf.zeros([3, 4]), tf.zeros([2, 3])],
        [],
        np.zeros([4, 2], np.int64),
        1.0,
        **attributes,
    )


OPS = pytest.mark.parametrize("op", [encode, decode, combine, combine_grad])


@OPS
def test_a_plan_is_accepted(op):
    op(**GOOD)


@OPS
@pytest.mark.parametrize(
    "wrong,text",
    [
        ({"world_size": 2**20 + 1}, "at most 1048576. Received: 1048577"),
        ({"world_size": 3}, "'grid': ranks .* below world_size=3.* 3 for cell"),
        ({"features": ["grid"]}, "of one length. Received: 1, 2, 2, 2, 2"),
        ({"vocabulary_sizes": [9]}, "of one length. Received: 2, 1, 2, 2, 2"),
        ({"dims": [4, 3, 2]}, "of one length. Received: 2, 2, 3, 2, 2"),
        ({"row_parts": []}, "of one length. Received: 2, 2, 2, 0, 2"),
        ({"column_parts": [2]}, "of one length. Received: 2, 2, 2, 2, 1"),
        ({"vocabulary_sizes": [9, 0]}, "'table': vocabulary_size .*: 0"),
        (
            {"vocabulary_sizes": [2**40 + 1, 5]},
            "'grid': vocabulary_size .* 1099511627776. Received: 1099511627777",
        ),
        ({"dims": [-1, 3]}, "'grid': dim must be at least 0 .*: -1"),
        ({"dims": [4, 2**30 + 1]}, "'table': dim .*: 1073741825"),
        ({"row_parts": [0, 1]}, "'grid': row_parts .*: 0 x 2 parts, 5 elem"),
        ({"row_parts": [3, 1]}, "'grid': row_parts .*: 3 x 2 parts, 5 elem"),
        ({"column_parts": [2, 2]}, "'table': .*: 1 x 2 parts, 1 elem"),
        (
            {"row_parts": [2**62, 1], "column_parts": [4, 1]},
            "'grid': .*: 4611686018427387904 x 4 parts",
        ),
        ({"ranks": [3, 0, 2, 1]}, "'table': .*: 1 x 1 parts, 0 elements"),
        ({"ranks": [3, 0, 2, 1, 1, 0]}, "5 in all. Received: 6 elements"),
        ({"ranks": [3, 0, 2, 3, 1]}, "'grid': ranks .*: 3 for cell 3"),
        ({"ranks": [3, 0, 2, -1, 1]}, "'grid': ranks .*: -1 for cell 3"),
    ],
)
def test_malformed_attributes_are_refused(op, wrong, text):
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        op(**GOOD | wrong)


@pytest.mark.parametrize("op", [encode, decode])
def test_rank_outside_of_the_world_is_refused(op):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"world_size=4\. Received: 4"
    ):
        op(rank=4, **GOOD)


def test_as_many_results_as_features():
    one = placement_attributes([TABLE], 4)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"per result, 2\. Received: 1"
    ):
        combine(**one)
