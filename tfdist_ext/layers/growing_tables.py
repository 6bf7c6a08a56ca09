# SPDX-License-Identifier: Apache-2.0
"""Tables of a layer whose vocabularies grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist_ext.layers.sparse_layer import SparseLayer
from tfdist_ext.sharding.key_shard import KeyShard
from tfdist_ext.tables.shard_spec import ShardSpec
from tfdist_ext.tables.table_config import TableConfig


class GrowingTables(SparseLayer):
    """Base of layers some of whose tables may have a `DynamicVocabulary`.

    Args:
        **kwargs: of a `SparseLayer`.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._keys: dict[str, KeyShard] = {}

    def _refuse_prefetched_keys(self, tables: Sequence[TableConfig]) -> None:
        growing = [table.name for table in tables if table.vocabulary]
        if self.prefetch_ids and growing:
            raise ValueError(
                f"Layer '{self.name}': prefetch_ids=True asks for rows a step "
                "ahead, which a vocabulary that grows may give to other keys "
                f"meanwhile. Leave it out, or put the tables {growing} into a "
                "layer of their own."
            )

    def _add_keys(
        self,
        tables: Sequence[TableConfig],
        specs: Sequence[ShardSpec],
        initializers: Sequence[Any],
    ) -> None:
        """Makes this rank's part of every vocabulary that grows."""
        for table, spec, initializer in zip(
            tables, specs, initializers, strict=True
        ):
            if table.vocabulary is not None:
                keys = KeyShard(
                    spec,
                    table.vocabulary,
                    initializer,
                    self._collectives,
                )
                self._keys[table.name] = keys
                setattr(self, f"keys_{table.name}", keys)

    def get_vocabularies(self) -> dict[str, dict[str, np.ndarray]]:
        """The keys of vocabularies that grow; under a strategy all ranks call.

        Returns:
            For every table with a `DynamicVocabulary`, by name: "keys" int64
            `[n]`, or fingerprints int64 `[n, 2]` of strings, with their
            "rows", "counts" and "steps" (when each was last seen), int64
            `[n]`, by row; with `keep_text` also "texts", bytes `[n]`.
        """
        return {name: keys.all_keys() for name, keys in self._keys.items()}

    def vocabulary_counts(self) -> dict[str, dict[str, int]]:
        """How full vocabularies are; under a strategy all ranks call.

        Returns:
            For every table with a `DynamicVocabulary`, by name: "capacity",
            "rows" in use, "candidates" not yet admitted, and since the start
            keys "admitted", "evicted" and "expired"; "step", the steps
            learned from.
        """
        return {
            name: {"capacity": keys.config.capacity, **keys.counts()}
            for name, keys in self._keys.items()
        }

    def save_own_variables(self, store: Any) -> None:
        """Writes tables whole, with their keys; all ranks call."""
        super().save_own_variables(store)
        for name, keys in self._keys.items():
            for what, array in keys.gathered().items():
                store[_entry(name, what)] = array

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of every table, and its keys."""
        super().load_own_variables(store)
        for name, keys in self._keys.items():
            start = _entry(name, "")
            keys.take(
                {
                    each.removeprefix(start): store[each]
                    for each in store.keys()  # noqa: SIM118 (not a dict)
                    if each.startswith(start)
                }
            )


def _entry(table: str, what: str) -> str:
    """The name of an array in a file of Keras."""
    return f"keys of {table}: {what}"
