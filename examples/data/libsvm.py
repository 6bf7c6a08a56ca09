# SPDX-License-Identifier: Apache-2.0
"""LIBSVM files: `label id:value id:value ...`, ids counted from 1."""

import pathlib
from collections.abc import Iterator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from data.files import demo_directory
from data.files import opened
from data.files import read_lines
from data.files import write_once


def count_features(files: Sequence[str]) -> int:
    """The largest id in the files, that is the width they need."""
    largest = 0
    for file in files:
        with opened(file) as stream:
            for line in stream:
                ids = [t.split(":")[0] for t in _pairs(line.decode())]
                largest = max([largest, *map(int, ids)])
    return largest


def _pairs(line: str) -> list[str]:
    return line.partition("#")[0].split()[1:]


def parse_lines(
    lines: tf.Tensor, features: int
) -> tuple[tf.SparseTensor, tf.Tensor]:
    """Parses a batch of lines.

    Args:
      lines: Lines of the file, string `[b]`. What follows a `#` is ignored.
      features: Width of the result.

    Returns:
      The samples, a float32 SparseTensor `[b, features]` with ids counted
      from 0, and the labels, float32 `[b, 1]`: 1 for a positive label, else 0.

    Raises:
      tf.errors.InvalidArgumentError: A line is not of the form, or an id is
        not in `[1, features]`.
    """
    lines = tf.strings.regex_replace(lines, "#.*", "")
    tokens = tf.strings.split(lines)
    labels = tf.strings.to_number(tokens[:, :1].to_tensor(shape=[None, 1]))
    pairs = tokens[:, 1:]
    parts = tf.strings.split(pairs.flat_values, ":")
    lengths = parts.row_lengths()
    tf.debugging.assert_equal(
        lengths, tf.constant(2, lengths.dtype), "not of the form id:value"
    )
    parts = tf.reshape(parts.flat_values, [-1, 2])
    ids = tf.strings.to_number(parts[:, 0], tf.int64) - 1
    _check_range(ids, features)
    indices = tf.stack([pairs.value_rowids(), ids], axis=1)
    samples = tf.SparseTensor(
        indices,
        tf.strings.to_number(parts[:, 1]),
        [tf.size(lines, tf.int64), features],
    )
    return samples, tf.cast(labels > 0, tf.float32)


def _check_range(ids: tf.Tensor, features: int) -> None:
    inside = tf.logical_and(ids >= 0, ids < features)
    outside = tf.boolean_mask(ids + 1, ~inside)
    tf.debugging.Assert(
        tf.reduce_all(inside),
        [f"LIBSVM ids must be in [1, {features}]. Received:", outside],
    )


def dataset(
    files: Sequence[str],
    batch_size: int,
    features: int,
    *,
    shuffle: int = 0,
    seed: int = 0,
) -> tf.data.Dataset:
    """Batches of the files, read as a stream.

    Args:
      files: Paths of LIBSVM files.
      batch_size: Samples per batch, over all ranks.
      features: As in `parse_lines`.
      shuffle: Lines in the shuffle buffer; 0 keeps the order of the file.
      seed: Seed of the shuffle. Must be the same on every rank.

    Returns:
      A dataset of what `parse_lines` returns.
    """
    lines = read_lines(files)
    if shuffle:
        lines = lines.shuffle(shuffle, seed=seed)
    batches = lines.batch(batch_size).map(
        lambda batch: parse_lines(batch, features),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return batches.prefetch(tf.data.AUTOTUNE)


def synthetic_file(rows: int, seed: int) -> pathlib.Path:
    """A generated file with 1000 features and a linear truth.

    Files that differ in `seed` only are samples of the same truth.
    """
    path = demo_directory() / f"linear-{rows}-{seed}.libsvm"
    return write_once(path, _synthetic_lines(rows, seed))


def _synthetic_lines(rows: int, seed: int) -> Iterator[str]:
    weights = np.random.default_rng(0).normal(0.0, 1.5, 1000)
    rng = np.random.default_rng(seed + 1)
    for _ in range(rows):
        hotness = rng.integers(5, 20)
        ids = np.unique((1000 ** rng.random(hotness)).astype(np.int64)) - 1
        values = np.round(rng.uniform(0.5, 1.5, ids.size), 3)
        log_odds = values @ weights[ids]
        label = "+1" if rng.random() < 1 / (1 + np.exp(-log_odds)) else "-1"
        pairs = zip((ids + 1).tolist(), values.tolist(), strict=True)
        yield " ".join([label, *(f"{i}:{v}" for i, v in pairs)])
