# SPDX-License-Identifier: Apache-2.0
"""Which part of the arrays that keys are saved as is a rank's."""

from __future__ import annotations

import dataclasses

from tfdist_ext.tables.dynamic_vocabulary import DynamicVocabulary

# In the order of `vocabulary_ops.export_keys`.
ROWS = ("keys", "counts", "steps")
CANDIDATES = tuple(f"candidate_{name}" for name in ROWS)
# The step and the hash key, the same for every bucket. Earlier versions saved
# the step alone.
STEP = "step"


@dataclasses.dataclass(frozen=True)
class KeySlices:
    """Buckets of a rank among those of all.

    Attributes:
        config: the rules of the vocabulary.
        rank: of this process.
        world_size: the number of ranks.
    """

    config: DynamicVocabulary
    rank: int
    world_size: int

    def owned(self, buckets: int) -> tuple[int, int]:
        """The first bucket of this rank, and the one after the last.

        Args:
            buckets: of all ranks.
        """
        first = self.rank * buckets // self.world_size
        return first, (self.rank + 1) * buckets // self.world_size

    @property
    def names(self) -> tuple[str, ...]:
        """What is saved of keys, texts left out."""
        if self.config.min_count > 1:
            return (*ROWS, *CANDIDATES, STEP)
        return (*ROWS, STEP)

    def slots(self, buckets: int) -> int:
        """Slots of every bucket.

        Args:
            buckets: of all ranks.
        """
        return -(-self.config.capacity // buckets)

    def shapes(self, buckets: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what all ranks save together, by name.

        Args:
            buckets: of all ranks.
        """
        slots = self.slots(buckets)
        words = 2 if self.config.key_dtype == "string" else 1
        return {
            name: (buckets, 3)
            if name == STEP
            else (buckets, slots, words)
            if name.endswith("keys")
            else (buckets, slots)
            for name in self.names
        }

    def slice_of(self, shape: tuple[int, ...]) -> str:
        """This rank's part of an array of all ranks, as TensorFlow writes it.

        A rank that owns nothing reads a bucket that it does not use.

        Args:
            shape: of that array.
        """
        first, end = self.owned(shape[0])
        size = max(end - first, 1)
        first = min(first, shape[0] - 1)
        parts = [f"{first},{size}", *(f"0,{each}" for each in shape[1:])]
        return f"{' '.join(map(str, shape))} {':'.join(parts)}"
