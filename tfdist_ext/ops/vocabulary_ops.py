# SPDX-License-Identifier: Apache-2.0
"""Ops of dynamic vocabularies: they map keys to rows of the entire table.

A vocabulary is a resource of one rank: the keys of the buckets that it owns.
Keys are int64 `[n]`, or `[n, 2]` for fingerprints of strings. The row of a key
without a row is -1. `tests/reference/vocabulary.py` implements the same rules
in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist_ext.ops.library import library
from tfdist_ext.tables.table_config import DynamicVocabulary

_SIP_KEY = (0x7466646973745F65, 0x78745F766F636162)


def vocabulary(
    name: str,
    config: DynamicVocabulary,
    hash_key: tf.Tensor,
    rank: int,
    world_size: int,
    first_rank: int = 0,
) -> tf.Tensor:
    """Creates a vocabulary, which is deleted with its handle.

    Args:
        name: the table's name, for errors.
        config: the rules of the vocabulary.
        hash_key: int64 `[2]`, the secret key of its hash, equal on all ranks.
        rank: the rank of this process.
        world_size: the number of ranks.
        first_rank: the rank that owns the first buckets.

    Returns:
        The handle, a resource scalar.
    """
    return library().tfdist_vocabulary(
        hash_key,
        table=name,
        capacity=config.capacity,
        buckets=config.buckets,
        words=2 if config.key_dtype == "string" else 1,
        min_count=config.min_count,
        evict=config.evict or "none",
        steps_to_live=config.steps_to_live or 0,
        full=config.full,
        unadmitted=config.unadmitted,
        rank=rank,
        world_size=world_size,
        first_rank=first_rank,
    )


def ask_keys(
    vocabularies: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    list_vocabularies: Sequence[int],
) -> tuple[tf.Tensor, ...]:
    """Encodes the unique keys of lists for the ranks that own them.

    Args:
        vocabularies: handles of T vocabularies.
        keys: lists of keys.
        list_vocabularies: the vocabulary of every list; ascending, without
            gaps.

    Returns:
        `payload` uint8 `[B]`; `splits` int64 `[world_size]`, its bytes for
        every rank; `positions` int32 `[n]`, the index of every key of all
        lists among the unique keys of its vocabulary; `places` int32 `[u]`,
        the index of each unique key among the vocabulary's keys in the
        payload; `asked` int64 `[T, world_size]`, the number of these keys for
        every rank.
    """
    outputs = library().tfdist_ask_keys(
        list(vocabularies),
        list(keys),
        list_vocabularies=list(list_vocabularies),
    )
    return tuple(outputs)


def answer_keys(
    vocabularies: Sequence[tf.Tensor],
    payload: tf.Tensor,
    splits: tf.Tensor,
    *,
    learn: bool,
    advance: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Answers the keys that `ask_keys` of all ranks sent to this rank.

    Args:
        vocabularies: handles of T vocabularies.
        payload: uint8 `[B]`, ordered by the rank that asked.
        splits: int64 `[world_size]`, its bytes from every rank.
        learn: whether keys are counted and admitted.
        advance: whether a step begins.

    Returns:
        `answers` uint8 `[A]`, which may contain errors, and its bytes for
        every rank, int64 `[world_size]`.
    """
    answers, answer_splits = library().tfdist_answer_keys(
        list(vocabularies), payload, splits, learn=learn, advance=advance
    )
    return answers, answer_splits


def read_rows(
    vocabularies: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    list_vocabularies: Sequence[int],
    answers: tf.Tensor,
    splits: tf.Tensor,
    positions: tf.Tensor,
    places: tf.Tensor,
    asked: tf.Tensor,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Reads the answers that `answer_keys` of all ranks sent to this rank.

    Args:
        vocabularies: handles of T vocabularies.
        keys: the argument of `ask_keys`.
        list_vocabularies: the argument of `ask_keys`.
        answers: uint8 `[A]`, ordered by the rank that answered.
        splits: int64 `[world_size]`, its bytes from every rank.
        positions, places, asked: results of `ask_keys`.

    Returns:
        For every list the rows of its keys, int32 `[n]`, and for every
        vocabulary `resets`, int64 `[r]`, rows that have lost their keys.

    Raises:
        tf.errors.FailedPreconditionError: if a vocabulary is full.
    """
    rows, resets = library().tfdist_read_rows(
        list(vocabularies),
        list(keys),
        answers,
        splits,
        positions,
        places,
        asked,
        list_vocabularies=list(list_vocabularies),
    )
    return list(rows), list(resets)


def local_rows(
    vocabularies: Sequence[tf.Tensor],
    keys: Sequence[tf.Tensor],
    list_vocabularies: Sequence[int],
    *,
    learn: bool,
    advance: bool,
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Does the work of the three functions above, for a single rank."""
    rows, resets = library().tfdist_local_rows(
        list(vocabularies),
        list(keys),
        list_vocabularies=list(list_vocabularies),
        learn=learn,
        advance=advance,
    )
    return list(rows), list(resets)


def export_keys(handle: tf.Tensor) -> list[tf.Tensor]:
    """Returns the keys of the buckets that this rank owns.

    Args:
        handle: the handle of a vocabulary.

    Returns:
        `keys` int64 `[buckets, slots, words]`, where a key has the row
        `1 + slot * all_buckets + bucket`; `counts` and `steps` int64
        `[buckets, slots]`, where a count of 0 means that there is no key; and
        the same three arrays of candidates.
    """
    return list(library().tfdist_export_keys(handle))


def import_keys(
    handle: tf.Tensor,
    buckets: int,
    hash_key: tf.Tensor,
    step: tf.Tensor,
    arrays: Sequence[tf.Tensor],
) -> tf.Operation:
    """Replaces the keys of a vocabulary.

    Args:
        handle: the handle of the vocabulary.
        buckets: number of buckets of all ranks.
        hash_key: int64 `[2]`, the hash key of the vocabulary that was exported.
        step: int64, the number of steps that it has learned from.
        arrays: the six arrays of `export_keys`; they may have fewer slots.

    Raises:
        tf.errors.InvalidArgumentError: if the arrays do not fit.
        tf.errors.DataLossError: if the arrays are damaged.
    """
    return library().tfdist_import_keys(
        handle,
        tf.constant(buckets, tf.int64),
        hash_key,
        tf.cast(step, tf.int64),
        *arrays,
    )


def vocabulary_counts(handle: tf.Tensor) -> tf.Tensor:
    """Returns counts of this rank's keys.

    Args:
        handle: the handle of a vocabulary.

    Returns:
        int64 `[9]`: rows in use; candidates; keys admitted, evicted and
        expired since the start; steps; buckets of all ranks; the hash key,
        which has two elements.
    """
    return library().tfdist_vocabulary_counts(handle)


def take_resets(handle: tf.Tensor) -> tf.Tensor:
    """Returns rows that lost their keys since the last call, int64 `[r]`.

    Args:
        handle: the handle of a vocabulary.
    """
    return library().tfdist_take_resets(handle)


def store_texts(
    handle: tf.Tensor, rows: tf.Tensor, texts: tf.Tensor
) -> tf.Operation:
    """Stores texts of keys on this rank, until their rows get other keys.

    Args:
        handle: the handle of a vocabulary.
        rows: int32 `[n]`, rows of the entire table. Rows below 1 are ignored,
            and rows whose text is stored already or was released.
        texts: string `[n]`.
    """
    return library().tfdist_store_texts(handle, rows, texts)


def release_texts(handle: tf.Tensor, rows: tf.Tensor) -> tf.Operation:
    """Replaces texts by a mark that other ranks store them.

    Args:
        handle: the handle of a vocabulary.
        rows: int32 `[n]`, rows of the entire table.
    """
    return library().tfdist_release_texts(handle, rows)


def stored_texts(handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the texts that are stored on this rank.

    Args:
        handle: the handle of a vocabulary.

    Returns:
        The rows in ascending order, int32 `[n]`, and their texts, string `[n]`.
    """
    rows, texts = library().tfdist_stored_texts(handle)
    return rows, texts


def fingerprints(texts: tf.Tensor) -> tf.Tensor:
    """Returns fingerprints of strings, which are equal in every process.

    A fingerprint has 127 bits: 64 of FarmHash, and the 63 that TensorFlow
    returns of SipHash with a fixed key. Among 10^9 strings, two have the same
    fingerprint with a probability below 10^-20.

    Args:
        texts: string `[n]`.

    Returns:
        int64 `[n, 2]`.
    """
    first = tf.bitcast(tf.fingerprint(texts), tf.int64)
    second = tf.strings.to_hash_bucket_strong(texts, tf.int64.max, _SIP_KEY)
    return tf.stack([first, second], axis=1)
