# SPDX-License-Identifier: Apache-2.0
"""Names of datasets, by which ranks exchange what concerns one of them."""

from __future__ import annotations

import tensorflow as tf

from tfdist_ext.collectives.collectives import Collectives

# Datasets that have names of their own at a time. A program may make any
# number of them, one in every `fit`, and what a name is exchanged by stays.
_DATASETS = 64


class DatasetNames:
    """Numbers that count on all ranks alike."""

    def __init__(self) -> None:
        self._number = 0

    def next(self, collectives: Collectives) -> str:
        """A name, the same on all ranks, which must all ask for it.

        Args:
            collectives: of the strategy.
        """
        # A rank that has failed where others went on has named fewer.
        numbers = collectives.all_gather(
            tf.constant([self._number], tf.int64), "input/number"
        )
        self._number = int(numbers[0]) % _DATASETS + 1
        return f"input{self._number}"
