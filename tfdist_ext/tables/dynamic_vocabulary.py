# SPDX-License-Identifier: Apache-2.0
"""A vocabulary whose keys come with the data, as a user describes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tfdist_ext.tables import checks
from tfdist_ext.tables import choices

# Rows are numbers of 32 bits, and one is shared.
MOST_KEYS = (1 << 31) - 2
# So many rows fill to about 95 % before the first bucket is full.
_ROWS_OF_BUCKET = 4096
_MOST_BUCKETS = 1024


@dataclasses.dataclass(frozen=True)
class DynamicVocabulary:
    """A table's vocabulary that grows: keys get rows when they are first seen.

    Keys are any 64-bit integers, or strings. See docs/vocabularies.md.

    >>> users = DynamicVocabulary(1_000_000, min_count=2, evict="lru")
    >>> users.rows
    1000001

    Attributes:
        capacity: keys that may have rows at once.
        min_count: occurrences, over all ranks and steps, from which on a key
            has a row. Until then it is a candidate.
        evict: which keys give up their rows when there is none left: "lru"
            those seen least recently, "lfu" those seen least often, None
            none.
        steps_to_live: a key that was not seen for more steps than this gives
            up its row; None for never.
        key_dtype: "int64" or "string".
        full: what a new key gets when no row is left for it: "error" ends
            the step on every rank, "shared_row" is row 0.
        unadmitted: what candidates, and keys that were never trained, get:
            "zeros", which do not learn, or "shared_row".
        keep_text: whether the texts of strings that have rows are kept, for
            `get_vocabularies`, checkpoints and exports.

    Raises:
        ValueError: for a value outside of these.
    """

    capacity: int
    min_count: int = 1
    evict: choices.Evict | None = None
    steps_to_live: int | None = None
    key_dtype: choices.KeyDtype = "int64"
    full: choices.Full = dataclasses.field(default="error", kw_only=True)
    unadmitted: choices.Unadmitted = dataclasses.field(
        default="zeros", kw_only=True
    )
    keep_text: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        where = "DynamicVocabulary"
        most = {"capacity": MOST_KEYS, "min_count": (1 << 32) - 1}
        for field, limit in most.items():
            value = checks.integer(field, getattr(self, field), 1, where, limit)
            object.__setattr__(self, field, value)
        if self.steps_to_live is not None:
            steps = checks.integer(
                "steps_to_live", self.steps_to_live, 1, where, (1 << 32) - 1
            )
            object.__setattr__(self, "steps_to_live", steps)
        if self.evict is not None:
            checks.one_of("evict", self.evict, choices.EVICTIONS, where)
        checks.one_of("key_dtype", self.key_dtype, choices.KEY_DTYPES, where)
        checks.one_of("full", self.full, choices.FULL, where)
        checks.one_of("unadmitted", self.unadmitted, choices.UNADMITTED, where)
        checks.boolean("keep_text", self.keep_text, where, optional=False)
        if self.keep_text and self.key_dtype != "string":
            raise ValueError(
                "Argument `keep_text` must be False where keys are no strings. "
                f"Received: keep_text=True, key_dtype='{self.key_dtype}' "
                f"({where}). Leave it out, or use key_dtype='string'."
            )

    @property
    def rows(self) -> int:
        """Rows of the table: one for each key, and row 0, which is shared."""
        return self.capacity + 1

    @property
    def takes_back(self) -> bool:
        """Whether a key may lose its row."""
        return self.evict is not None or self.steps_to_live is not None

    @property
    def buckets(self) -> int:
        """Parts of a new vocabulary, a power of two; saved ones keep theirs."""
        wanted = min(max(self.capacity // _ROWS_OF_BUCKET, 1), _MOST_BUCKETS)
        return 1 << (wanted.bit_length() - 1)

    def get_config(self) -> dict[str, Any]:
        """The arguments that make this object again."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DynamicVocabulary:
        """The object that `get_config` describes.

        Args:
            config: of `get_config`.

        Raises:
            ValueError: for fields that are not known, or lacking.
        """
        return cls(**checks.fields_of(cls, config, "config of a vocabulary"))


def refuse(field: str, value: Any, where: str) -> None:
    """Refuses a vocabulary where a number of rows is asked for.

    Raises:
        ValueError: then.
    """
    if isinstance(value, DynamicVocabulary):
        raise ValueError(
            f"Argument `{field}` must be a number of rows. Received: {field}="
            f"{value} ({where}). A vocabulary that grows is of a table of "
            "DistributedEmbedding: TableConfig(name, embedding_dim=..., "
            "vocabulary=DynamicVocabulary(...))."
        )
