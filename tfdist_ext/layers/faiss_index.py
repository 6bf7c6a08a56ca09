# SPDX-License-Identifier: Apache-2.0
"""Approximate indexes of candidates for faiss, with their measured recall."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

# Queries of which scores of all candidates are in memory at a time.
_BLOCK = 256


def library() -> Any:
    """Imports faiss.

    Raises:
        ImportError: faiss is not installed. The error says how to install it.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError(
            "`export_faiss` needs the package faiss: pip install faiss-cpu"
        ) from error
    return faiss


def write(
    path: str,
    factory: str,
    identifiers: np.ndarray,
    rows: np.ndarray,
    queries: np.ndarray,
    k: int,
) -> dict[str, Any]:
    """Builds an index, measures its recall and writes it.

    Args:
        path: path of the index file.
        factory: description of the index, see `ShardedTopK.export_faiss`.
        identifiers: integers or strings `[n]`.
        rows: float `[n, dim]`.
        queries: float `[q, dim]`.
        k: how many candidates are compared for each query.

    Returns:
        What `path + ".json"` contains, without strings.

    Raises:
        ImportError: faiss is not installed.
        ValueError: faiss cannot build the index. The error has its reason.
        OSError: the files cannot be written.
    """
    faiss = library()
    rows = np.ascontiguousarray(rows, np.float32)
    queries = np.ascontiguousarray(queries, np.float32)
    texts = identifiers.dtype.kind not in "iu"
    numbers = np.arange(len(rows)) if texts else identifiers.astype(np.int64)
    try:
        built = faiss.index_factory(
            rows.shape[1], f"IDMap2,{factory}", faiss.METRIC_INNER_PRODUCT
        )
        built.train(rows)
        built.add_with_ids(rows, numbers)
        found = built.search(queries, k)[1]
    except RuntimeError as error:
        raise ValueError(
            f"faiss cannot build the index of {len(rows)} candidates with "
            f"`factory`, a description for `faiss.index_factory`. Received: "
            f"factory={factory!r}. faiss says: {error}"
        ) from error
    facts: dict[str, Any] = {
        "factory": factory,
        "candidates": len(rows),
        "dim": rows.shape[1],
        "queries": len(queries),
        "k": k,
        "recall": _recall(found, numbers, rows, queries),
    }
    names = [_text(each) for each in identifiers] if texts else None
    _replace(path, lambda part: _write_index(faiss, built, part))
    facts["bytes"] = os.path.getsize(path)
    stored = json.dumps({**facts, "identifiers": names}, ensure_ascii=False)
    _replace(f"{path}.json", lambda part: _write_text(part, stored))
    return facts


def _recall(
    found: np.ndarray,
    numbers: np.ndarray,
    rows: np.ndarray,
    queries: np.ndarray,
) -> float:
    """The share of the k best candidates that an index finds.

    A candidate whose score is that of the k-th best counts as one of them.
    """
    k = found.shape[1]
    order = np.argsort(numbers)
    hits = 0
    for start in range(0, len(queries), _BLOCK):
        block = slice(start, start + _BLOCK)
        scores = queries[block] @ rows.T
        least = np.partition(scores, -k, axis=1)[:, -k, None]
        given = found[block]
        places = np.searchsorted(numbers, np.maximum(given, 0), sorter=order)
        mine = np.take_along_axis(scores, order[places], axis=1)
        near = mine >= least - 1e-5 * np.abs(least)
        hits += int(np.sum(near & (given >= 0)))
    return hits / found.size


def _text(identifier: bytes | str) -> str:
    if isinstance(identifier, bytes):
        return identifier.decode(errors="surrogateescape")
    return str(identifier)


def _write_index(faiss: Any, index: Any, path: str) -> None:
    try:
        faiss.write_index(index, path)
    except RuntimeError as error:
        raise OSError(f"faiss cannot write '{path}': {error}") from error


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(text)


def _replace(path: str, write_to: Callable[[str], None]) -> None:
    """Writes a file beside its place and moves it there."""
    part = f"{path}.part"
    try:
        write_to(part)
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(part)
