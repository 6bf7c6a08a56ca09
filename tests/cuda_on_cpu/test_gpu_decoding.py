# SPDX-License-Identifier: Apache-2.0
"""Ids decoded by the kernel for GPUs, under emulation: what a CPU decodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import fuzzing
from tests.cuda_on_cpu.emulated_ops import EmulatedOps
from tests.cuda_on_cpu.emulated_ops import on_cpu
from tests.ops.id_exchange import NONE
from tests.ops.id_exchange import batch_of
from tests.ops.id_exchange import encode
from tests.ops.id_exchange import message_to
from tests.ops.id_exchange import placed
from tfdist_ext.ops import id_ops
from tfdist_ext.ops import lookup_ops

RANKS, RANK = 3, 1
# By row, by column, on this rank alone, on another; every row once.
PLACEMENTS = [
    placed("row", 9700, RANKS, 1),
    placed("column", 2**40, 1, RANKS),
    placed("here", 3000, 1, 1, RANK, RANKS),
    placed("elsewhere", 3000, 1, 1, 2, RANKS),
    placed("unique", 5000, 2, 1, 1, RANKS),
]


def messages(
    samples: int, most: int, weighted: bool = False, in_blocks: bool = True
) -> list[np.ndarray]:
    """What all ranks send to one of them."""
    rng = np.random.default_rng(samples + most)
    found = []
    for rank in range(RANKS):
        batch = [
            [batch_of(rng, samples, most, min(p.vocabulary_size, 2**31))]
            for p in PLACEMENTS
        ]
        if weighted:
            ids, splits, _ = batch[2][0]
            weights = rng.normal(size=len(ids)).astype(np.float32)
            batch[2] = [(ids, splits, weights)]
        unique = np.unique(rng.integers(0, 5000, samples))
        batch[4] = [(unique, np.arange(len(unique) + 1), NONE)]
        encoded = encode(
            *(id_ops, batch, PLACEMENTS, rank, RANKS),
            unique=[False] * 4 + [True],
            in_blocks=in_blocks,
        )
        found.append(message_to(RANK, encoded))
    return found


def decoding(sent: list[np.ndarray]) -> Callable[[], Any]:
    payload = tf.Variable(np.concatenate(sent))  # constants would be folded
    splits = tf.constant([len(each) for each in sent], tf.int64)
    return lambda: id_ops.decode_ids(
        payload.value(),
        splits,
        placements=PLACEMENTS,
        rank=RANK,
        world_size=RANKS,
    )


def outcome(run: Callable[[Callable[[], Any]], Any], sent: Any) -> Any:
    """What is decoded, or why it is refused."""
    try:
        return [each.numpy() for each in run(decoding(sent))]
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        (text,) = [
            line.split("}} ")[-1]
            for line in error.message.splitlines()
            if "rank" in line or "payload" in line
        ][:1]
        return type(error), text


def expect_same(gpu: EmulatedOps, sent: Any) -> Any:
    expected, found = outcome(on_cpu, sent), outcome(gpu.run, sent)
    if isinstance(expected, tuple):
        assert found == expected
        return expected
    assert isinstance(found, list), found
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    return None


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "samples, most", [(0, 0), (5, 0), (1, 1), (200, 1), (90, 30)]
)
def test_what_a_cpu_decodes(
    gpu: EmulatedOps, samples: int, most: int, weighted: bool, in_blocks: bool
) -> None:
    launches, waits = gpu.launches(), gpu.waits()
    sent = messages(samples, most, weighted, in_blocks)
    assert expect_same(gpu, sent) is None
    assert (gpu.launches(), gpu.waits()) == (launches + 1, waits + 1)


def test_damaged_messages_are_refused_with_the_same_words(
    gpu: EmulatedOps,
) -> None:
    rng = np.random.default_rng(0)
    reasons = set()
    whole = messages(60, 9, weighted=True)
    for _ in range(fuzzing.inputs(300, parts=1)):
        sent = [each.copy() for each in whole]
        for _ in range(rng.integers(1, 4)):
            message = sent[rng.integers(RANKS)]
            message[rng.integers(len(message))] ^= 1 << rng.integers(8)
        if rng.integers(4) == 0:
            sent[2] = sent[2][: rng.integers(len(sent[2]))]
        reasons.add(expect_same(gpu, sent))
    assert None in reasons and len(reasons) > 9


def test_a_bad_id_of_any_rank_is_an_error(gpu: EmulatedOps) -> None:
    sent = messages(3, 2)
    batch = [[(np.array([-7]), np.array([0, 1]), NONE)] for _ in PLACEMENTS]
    encoded = encode(id_ops, batch, PLACEMENTS, 2, RANKS)
    sent[2] = message_to(RANK, encoded)
    kind, text = expect_same(gpu, sent)
    assert kind is tf.errors.InvalidArgumentError and "-7" in text


def test_what_is_decoded_is_looked_up(gpu: EmulatedOps) -> None:
    """And summed by row: one wait for the ids and one for their gradient."""
    tables = [tf.Variable(tf.random.normal([40, width])) for width in (8, 3)]
    decode = decoding(messages(40, 6))

    def step() -> Any:
        row_splits, rows, weights, served, _ = decode()
        where = {"feature_tables": [0, 0, 1, -1, 1]}
        entries = row_splits, rows % 40, weights, served
        values, splits = lookup_ops.lookup(tables, *entries, **where)
        shapes = [table.shape for table in tables]
        grads = lookup_ops.lookup_grad(
            *entries, tf.sin(values), table_shapes=shapes, **where
        )
        return values, splits, grads

    waits = gpu.waits()
    expected = tf.nest.flatten(on_cpu(step))
    for ours, theirs in zip(
        tf.nest.flatten(gpu.run(step)), expected, strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert gpu.waits() == waits + 2


def test_waits_overlap(gpu: EmulatedOps) -> None:
    """As many as TensorFlow has no threads for."""
    count = 4 * (os.cpu_count() or 1)
    sent = messages(5, 3)
    decodings = [decoding(sent) for _ in range(count)]

    def many() -> Any:
        decoded = [decode() for decode in decodings]
        return [
            lookup_ops.lookup_grad(
                *(row_splits, rows % 9, weights, served),
                tf.zeros([tf.reduce_sum(served)]),
                feature_tables=[0] * len(PLACEMENTS),
                table_shapes=[(9, 1)],
            )
            for row_splits, rows, weights, served, _ in decoded
        ]

    waits = gpu.waits()
    gpu.wait_together(count)
    gpu.run(many)
    assert gpu.waits() == waits + 2 * count
