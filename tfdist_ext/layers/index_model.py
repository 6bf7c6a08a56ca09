# SPDX-License-Identifier: Apache-2.0
"""An index by itself as a model, which can be exported."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

keras = tf.keras


class IndexModel(keras.Model):  # type: ignore[name-defined]
    """Gives what an index finds.

    Args:
        index: a `ShardedTopK`.
    """

    def __init__(self, index: Any) -> None:
        super().__init__(name=index.name)
        self.index = index

    def call(self, queries: Any) -> Any:
        """Searches.

        Args:
            queries: as the index takes them.
        """
        return self.index(queries)
