# SPDX-License-Identifier: Apache-2.0
"""Ops of vocabularies that grow: from keys to rows of the whole table.

A vocabulary is a resource of this rank: the keys of the buckets it owns. Keys
are int64 `[n]`, or `[n, 2]` for the fingerprints of strings. A row is -1 for a
key without one. `tests/reference/vocabulary.py` has the same rules in plain
Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """A new vocabulary, which lives as long as its handle does.

    Args:
        name: of the table, for errors.
        config: its rules.
        hash_key: int64 `[2]`, the secret of its hash, the same on all ranks.
        rank: of this process.
        world_size: number of ranks.
        first_rank: which owns the first buckets.

    Returns:
        A resource scalar.
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
    """Codes the unique keys of lists for the ranks that own them.

    Args:
        vocabularies: T of them.
        keys: lists.
        list_vocabularies: of every list; ascending, without gaps.

    Returns:
        `payload` uint8 `[B]`; `splits` int64 `[world_size]`, its bytes for
        every rank; `positions` int32 `[n]`, the place of every key of all
        lists among the unique ones of its vocabulary; `places` int32 `[u]`,
        where each of these is among those of its vocabulary in the payload;
        `asked` int64 `[T, world_size]`, how many of these go to every rank.
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
    """Answers what `ask_keys` of all ranks asked this one.

    Args:
        vocabularies: T of them.
        payload: uint8 `[B]`, in order of the ranks that asked.
        splits: int64 `[world_size]`, its bytes.
        learn: whether keys are counted and admitted.
        advance: whether a step begins.

    Returns:
        `answers` uint8 `[A]`, and its bytes for every rank. Errors travel in
        it.
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
    """Reads what `answer_keys` of all ranks answered.

    Args:
        vocabularies: T of them.
        keys: that `ask_keys` got.
        list_vocabularies: that `ask_keys` got.
        answers: uint8 `[A]`, in order of the ranks that answered.
        splits: int64 `[world_size]`, its bytes.
        positions, places, asked: of `ask_keys`.

    Returns:
        For every list the rows of its keys, int32 `[n]`, and for every
        vocabulary `resets`, int64 `[r]`, rows that have lost their keys.

    Raises:
        tf.errors.FailedPreconditionError: a vocabulary is full.
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
    """What the three above do, where there is one rank."""
    rows, resets = library().tfdist_local_rows(
        list(vocabularies),
        list(keys),
        list_vocabularies=list(list_vocabularies),
        learn=learn,
        advance=advance,
    )
    return list(rows), list(resets)


def export_keys(handle: tf.Tensor) -> list[tf.Tensor]:
    """The keys of the buckets that this rank owns.

    Args:
        handle: of a vocabulary.

    Returns:
        `keys` int64 `[buckets, slots, words]`, of row
        `1 + slot * all_buckets + bucket`; `counts` and `steps` int64
        `[buckets, slots]`, a count of 0 where there is no key; and the same
        three of candidates.
    """
    return list(library().tfdist_export_keys(handle))


def import_keys(
    handle: tf.Tensor,
    buckets: int,
    hash_key: tf.Tensor,
    step: Any,
    arrays: Sequence[tf.Tensor],
) -> Any:
    """Replaces the keys of a vocabulary.

    Args:
        handle: of the vocabulary.
        buckets: of all ranks.
        hash_key: int64 `[2]`, that of the vocabulary the keys come from.
        step: int64, how many it has learned from.
        arrays: six, of `export_keys`; their slots may be fewer.

    Raises:
        tf.errors.InvalidArgumentError: they do not fit.
        tf.errors.DataLossError: they are damaged.
    """
    return library().tfdist_import_keys(
        handle,
        tf.constant(buckets, tf.int64),
        hash_key,
        tf.cast(step, tf.int64),
        *arrays,
    )


def vocabulary_counts(handle: tf.Tensor) -> tf.Tensor:
    """Figures of this rank's keys.

    Args:
        handle: of a vocabulary.

    Returns:
        int64 `[9]`: rows in use, candidates; keys admitted, evicted and
        expired since the start; steps; buckets of all ranks; the hash key.
    """
    return library().tfdist_vocabulary_counts(handle)


def take_resets(handle: tf.Tensor) -> tf.Tensor:
    """Rows that have lost their keys since the last call, int64 `[r]`.

    Args:
        handle: of a vocabulary.
    """
    return library().tfdist_take_resets(handle)


def keep_texts(handle: tf.Tensor, rows: tf.Tensor, texts: tf.Tensor) -> Any:
    """Keeps texts of keys on this rank, until their rows are other keys'.

    Args:
        handle: of a vocabulary.
        rows: int32 `[n]`, of the whole table. Nothing is kept of those below
            1, nor of those of which a text is kept, or was shortened.
        texts: string `[n]`.
    """
    return library().tfdist_keep_texts(handle, rows, texts)


def shorten_texts(handle: tf.Tensor, rows: tf.Tensor) -> Any:
    """Remembers that texts are kept on other ranks.

    Args:
        handle: of a vocabulary.
        rows: int32 `[n]`, of the whole table.
    """
    return library().tfdist_shorten_texts(handle, rows)


def kept_texts(handle: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The texts that are kept on this rank.

    Args:
        handle: of a vocabulary.

    Returns:
        Rows int32 `[n]`, in order, and their texts, string `[n]`.
    """
    rows, texts = library().tfdist_kept_texts(handle)
    return rows, texts


def fingerprints(texts: tf.Tensor) -> tf.Tensor:
    """Fingerprints of strings, the same in every process and for ever.

    Of 127 bits: FarmHash, and SipHash with a fixed key, of which TensorFlow
    gives 63. Of 10^9 strings two are alike with a probability below 10^-20.

    Args:
        texts: string `[n]`.

    Returns:
        int64 `[n, 2]`.
    """
    first = tf.bitcast(tf.fingerprint(texts), tf.int64)
    second = tf.strings.to_hash_bucket_strong(texts, tf.int64.max, _SIP_KEY)
    return tf.stack([first, second], axis=1)
