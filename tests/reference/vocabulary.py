# SPDX-License-Identifier: Apache-2.0
"""The rules of a vocabulary that grows, in plain Python.

One object stands for all ranks: it is given the keys of all of them, in any
order. A bucket is a dictionary.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from tfdist_ext.tables.table_config import DynamicVocabulary

_SHARE = 16  # of a full bucket, that gives up its rows at once
_SLOTS_PER_STEP = 4096  # that a search for expired keys looks at


@dataclasses.dataclass
class _Known:
    count: int
    step: int
    slot: int | None = None


class Full(Exception):
    """A key finds no row, and that is an error."""


# Of the tests; see hash_key.h.
HASH_KEY = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
_MASK = 2**64 - 1


def hash_of(key: tuple[int, ...], hash_key: tuple[int, int]) -> int:
    """SipHash-1-3 of a key's words, or what earlier versions had."""
    if hash_key == (0, 0):
        return _without_secret(key[0] & _MASK)
    k0, k1 = (word & _MASK for word in hash_key)
    a, b = k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D
    c, d = k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573
    for word in (*key, 8 * len(key) << 56):
        a, b, c, d = _round(a, b, c, d ^ word & _MASK)
        a ^= word & _MASK
    c ^= 0xFF
    for _ in range(3):
        a, b, c, d = _round(a, b, c, d)
    return a ^ b ^ c ^ d


def _round(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    def rotated(x: int, bits: int) -> int:
        return (x << bits | x >> 64 - bits) & _MASK

    a = a + b & _MASK
    b = rotated(b, 13) ^ a
    a = rotated(a, 32)
    c = c + d & _MASK
    d = rotated(d, 16) ^ c
    a = a + d & _MASK
    d = rotated(d, 21) ^ a
    c = c + b & _MASK
    b = rotated(b, 17) ^ c
    return a, b, rotated(c, 32), d


def _without_secret(x: int) -> int:
    """The 64-bit finalizer of MurmurHash3."""
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & _MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return x ^ x >> 33


class Vocabulary:
    """See `DynamicVocabulary` and docs/vocabularies.md."""

    def __init__(
        self, config: DynamicVocabulary, hash_key: tuple[int, int] = HASH_KEY
    ) -> None:
        self.config = config
        self.hash_key = hash_key
        self.now = 0
        self.count = config.buckets
        self.buckets: list[dict] = [{} for _ in range(self.count)]
        self.resets: list[int] = []
        self.totals = collections.Counter()

    def learn(self, keys: np.ndarray, advance: bool = True) -> np.ndarray:
        """The rows of one step's keys, `[n]` or `[n, 2]`."""
        self.resets = []
        if advance:
            self.now += 1
            every = max(self._limit(0) // _SLOTS_PER_STEP, 1)
            if self.config.steps_to_live and self.now % every == 0:
                self._sweep(self.now // every % self.count)
        asked = collections.Counter(_tuples(keys))
        by_bucket = collections.defaultdict(list)
        for key in sorted(asked):
            by_bucket[self._bucket(key)].append(key)
        # Keys with rows are counted first: none of this step is evicted.
        rows: dict = {}
        for bucket, members in by_bucket.items():
            for key in members:
                known = self.buckets[bucket].get(key)
                if known and known.slot is not None and not self._old(known):
                    known.count += asked[key]
                    known.step = self.now
                    rows[key] = self._row(bucket, known.slot)
        for bucket in sorted(by_bucket):
            rest = [key for key in by_bucket[bucket] if key not in rows]
            self._settle(bucket, rest, asked, rows)
        return np.array([rows[key] for key in _tuples(keys)], np.int64)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The rows of keys, without learning."""
        return np.array([self._found(key) for key in _tuples(keys)], np.int64)

    def rows(self) -> dict:
        """Row, count and step of the keys that have rows."""
        return {
            key: (self._row(bucket, known.slot), known.count, known.step)
            for bucket, content in enumerate(self.buckets)
            for key, known in content.items()
            if known.slot is not None
        }

    def _found(self, key: tuple[int, ...]) -> int:
        bucket = self._bucket(key)
        known = self.buckets[bucket].get(key)
        if known and not self._old(known):
            if known.slot is not None:
                return self._row(bucket, known.slot)
            if known.count >= self.config.min_count:
                return 0
        elif (
            self.config.full == "shared_row"
            and self.config.min_count == 1
            and not self._free(bucket)
        ):
            return 0
        return self._unadmitted()

    def _unadmitted(self) -> int:
        return 0 if self.config.unadmitted == "shared_row" else -1

    def _bucket(self, key: tuple[int, ...]) -> int:
        return hash_of(key, self.hash_key) * self.count >> 64

    def _limit(self, bucket: int) -> int:
        return -(-(self.config.capacity - bucket) // self.count)

    def _row(self, bucket: int, slot: int) -> int:
        return 1 + slot * self.count + bucket

    def _old(self, known: _Known) -> bool:
        live = self.config.steps_to_live
        return live is not None and self.now - known.step > live

    def _free(self, bucket: int) -> list[int]:
        taken = {known.slot for known in self.buckets[bucket].values()}
        return [s for s in range(self._limit(bucket)) if s not in taken]

    def _remove(self, bucket: int, key: tuple[int, ...]) -> None:
        known = self.buckets[bucket].pop(key)
        if known.slot is not None:
            self.resets.append(self._row(bucket, known.slot))

    def _sweep(self, bucket: int) -> None:
        for key, known in list(self.buckets[bucket].items()):
            if self._old(known):
                self._remove(bucket, key)
                self.totals["expired"] += 1

    def _settle(self, bucket, keys, asked, rows) -> None:
        content = self.buckets[bucket]
        admitted, candidates = [], []
        for key in keys:
            rows[key] = self._unadmitted()
            known = content.get(key)
            if known and self._old(known):
                self._remove(bucket, key)
                self.totals["expired"] += 1
                known = None
            if known:
                known.count += asked[key]
                known.step = self.now
            count = known.count if known else asked[key]
            if count >= self.config.min_count:
                admitted.append((key, count))
            elif not known:
                candidates.append((key, count))
        self._admit(bucket, admitted, candidates, rows)
        self._remember(bucket, candidates)

    def _admit(self, bucket, admitted, candidates, rows) -> None:
        content = self.buckets[bucket]
        if len(admitted) > len(self._free(bucket)):
            if self.config.steps_to_live:
                self._sweep(bucket)
            missing = len(admitted) - len(self._free(bucket))
            if missing > 0 and self.config.evict:
                self.totals["evicted"] += self._remove_first(
                    bucket, True, max(missing, self._limit(bucket) // _SHARE)
                )
        free = iter(self._free(bucket))
        for key, count in admitted:
            slot = next(free, None)
            if slot is not None:
                content[key] = _Known(count, self.now, slot)
                rows[key] = self._row(bucket, slot)
                self.totals["admitted"] += 1
                continue
            if self.config.full == "error":
                raise Full(key)
            rows[key] = 0
            if key not in content:
                candidates.append((key, count))

    def _remember(self, bucket, candidates) -> None:
        most = self._limit(bucket) if self.config.min_count > 1 else 0
        missing = self._candidates(bucket) + len(candidates) - most
        if missing > 0:
            self._remove_first(bucket, False, max(missing, most // _SHARE))
        for key, count in candidates:
            if self._candidates(bucket) < most:
                self.buckets[bucket][key] = _Known(count, self.now)

    def _candidates(self, bucket: int) -> int:
        return sum(k.slot is None for k in self.buckets[bucket].values())

    def _remove_first(self, bucket: int, with_rows: bool, count: int) -> int:
        by_count = with_rows and self.config.evict == "lfu"
        order = sorted(
            (
                (known.count, known.step, key)
                if by_count
                else (known.step, known.count, key)
            )
            for key, known in self.buckets[bucket].items()
            if (known.slot is not None) == with_rows and known.step < self.now
        )
        for _, _, key in order[:count]:
            self._remove(bucket, key)
        return len(order[:count])


def _tuples(keys: np.ndarray) -> list[tuple[int, ...]]:
    keys = np.asarray(keys, np.int64)
    return [tuple(row) for row in keys.reshape(len(keys), -1).tolist()]
