# SPDX-License-Identifier: Apache-2.0
"""Raw Criteo click logs: label, 13 integers, 26 categories, tab separated.

Kaggle's train.txt and the days of the log of 1 TB, packed or not, are alike.
Any field but the label may be missing, and a line may end early. Every field
becomes one id, the hash of "name=value"; integers are given as numbers too.
"""

from collections.abc import Sequence

import tensorflow as tf

from data.files import read_lines

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))
FIELDS = INTEGERS + CATEGORIES
VALIDATION_EVERY = 10  # Each tenth line is held out.
_BLOCK = 100 * VALIDATION_EVERY  # Lines are split into the parts in blocks.


def parse_lines(
    lines: tf.Tensor, buckets: int, crosses: Sequence[Sequence[str]] = ()
) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Parses a batch of lines.

    Args:
      lines: Lines of the file, string `[b]`.
      buckets: Ids are hashed into `[0, buckets)`.
      crosses: Groups of fields, each hashed together into one more id.

    Returns:
      The features `{"ids": int64 [b, 39 + len(crosses)], "numbers": float32
      [b, 13]}` and the labels, float32 `[b, 1]`. A missing integer is the
      number 0; its id, as that of a missing category, is one of its own.

    Raises:
      tf.errors.InvalidArgumentError: A line has more than 40 fields, no label
        or an integer that is none.
    """
    columns = tf.strings.split(lines, "\t")
    tf.debugging.assert_less_equal(
        columns.row_lengths(),
        tf.constant(1 + len(FIELDS), tf.int64),
        "a line has more than 40 fields",
    )
    columns = columns.to_tensor(shape=[None, 1 + len(FIELDS)])
    labels = tf.strings.to_number(columns[:, :1])
    integers = columns[:, 1 : 1 + len(INTEGERS)]
    numbers = _to_numbers(integers)
    categories = columns[:, 1 + len(INTEGERS) :]
    values = [_integer_tokens(integers, numbers), categories]
    prefixes = tf.constant([f"{field}=" for field in FIELDS])
    tokens = tf.add(prefixes, tf.concat(values, axis=1))
    tokens = tf.concat([tokens, *_cross_tokens(tokens, crosses)], axis=1)
    ids = tf.strings.to_hash_bucket_fast(tokens, buckets)
    logs = tf.math.log1p(tf.maximum(numbers, 0.0))
    return {"ids": ids, "numbers": logs}, labels


def _to_numbers(texts: tf.Tensor) -> tf.Tensor:
    """Numbers written in `texts`, 0 for an empty text."""
    return tf.strings.to_number(tf.where(texts == "", "0", texts))


def _integer_tokens(texts: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Bins that widen with the number: floor(log(x)^2) from 3 onwards."""
    logs = tf.math.log(tf.maximum(numbers, 3.0))
    bins = tf.where(numbers > 2, tf.floor(logs * logs) + 2, numbers)
    tokens = tf.strings.as_string(tf.cast(bins, tf.int64))
    return tf.where(texts == "", "", tokens)


def _cross_tokens(
    tokens: tf.Tensor, crosses: Sequence[Sequence[str]]
) -> list[tf.Tensor]:
    """One column `[b, 1]` per cross: the tokens of its fields, joined."""
    joined = []
    for cross in crosses:
        parts = [tokens[:, FIELDS.index(field)] for field in cross]
        joined.append(tf.strings.join(parts, "&")[:, tf.newaxis])
    return joined


def _part(block: tf.Tensor, validation: bool) -> tf.Tensor:
    """The wanted lines of `block`, which starts at a multiple of ten."""
    last = VALIDATION_EVERY - 1
    held_out = tf.range(tf.size(block)) % VALIDATION_EVERY == last
    return tf.boolean_mask(block, held_out == validation)


def dataset(
    files: Sequence[str],
    batch_size: int,
    buckets: int,
    *,
    validation: bool,
    crosses: Sequence[Sequence[str]] = (),
    shuffle: int = 0,
    seed: int = 0,
) -> tf.data.Dataset:
    """Batches of one part of the files, read as a stream.

    Args:
      files: Paths of raw Criteo files.
      batch_size: Samples per batch, over all ranks.
      buckets: As in `parse_lines`.
      validation: Whether to give the held-out tenth or the rest.
      crosses: As in `parse_lines`.
      shuffle: Lines in the shuffle buffer; 0 keeps the order of the file.
      seed: Seed of the shuffle. Must be the same on every rank.

    Returns:
      A dataset of what `parse_lines` returns.
    """
    lines = read_lines(files)
    held_out = lines.cardinality().numpy() // VALIDATION_EVERY
    count = held_out if validation else lines.cardinality().numpy() - held_out
    blocks = lines.batch(_BLOCK).map(lambda block: _part(block, validation))
    known = tf.data.experimental.assert_cardinality(count)
    lines = blocks.unbatch().apply(known)
    if shuffle:
        lines = lines.shuffle(shuffle, seed=seed)
    batches = lines.batch(batch_size).map(
        lambda batch: parse_lines(batch, buckets, crosses),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return batches.prefetch(tf.data.AUTOTUNE)
