# SPDX-License-Identifier: Apache-2.0
"""State of the calls of this package that a thread has in progress.

Keras and TensorFlow call functions of this package in the middle of their own
calls, without a way to pass arguments through. What such a function must know
is set here around the outer call. This is the only thread-local state of the
package. Every value is restored when its block ends, so calls may be nested.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class ThreadContext(threading.local):
    """The values of one thread.

    Attributes:
        savers: the collectives that savers of checkpoints use, None for stock.
        copies: a list that takes what is saved instead of files, else None.
        changed: the `ChangedRows` that a save is limited to, else None.
        full: path of the checkpoint that a restored one is a change of.
        reading_files: number of nested reads of Keras files.
        public_save: whether `tf.saved_model.save` was called by the user.
        reads_allowed: number of blocks in which kernels may be read as parts.
        new_shard: the `ShardSpec` of variables being created, else None.
        new_storage: where variables being created are stored, else None.
        capture: the capture, or its replay, of a model's lookups, else None.
        answer: answers lookups with stock ops during an export, else None.
        predicting: the model of Keras 3 whose `predict` runs, else None.
        in_loop_of_ranks: whether a loop of Keras runs on several ranks.
        state_trees: "saved" or "loaded", while Keras's state trees are those
            of Orbax checkpoints, else None.
    """

    savers: Any = None
    copies: list[Any] | None = None
    changed: Any = None
    full: str | None = None
    reading_files: int = 0
    public_save: bool = False
    reads_allowed: int = 0
    new_shard: Any = None
    new_storage: Any = None
    capture: Any = None
    answer: Any = None
    predicting: Any = None
    in_loop_of_ranks: bool = False
    state_trees: str | None = None


current = ThreadContext()


@contextlib.contextmanager
def setting(**values: Any) -> Iterator[None]:
    """Sets attributes of `current` inside of the block.

    Args:
        values: by the names of the attributes.
    """
    before = {name: getattr(current, name) for name in values}
    try:
        for name, value in values.items():
            setattr(current, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(current, name, value)
