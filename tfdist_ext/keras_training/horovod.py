# SPDX-License-Identifier: Apache-2.0
"""What Horovod gives Keras, and would do a second time here, is refused."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer of Horovod, which would sum gradients again.

    Args:
        optimizer: of a model, or None; also within that of a loss scale.

    Raises:
        ValueError: it is one; says what to do.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if _of_horovod(inner):
        raise ValueError(
            "hvd.DistributedOptimizer exchanges gradients that the strategy "
            "has exchanged already (or, with Keras 3, does nothing). Give "
            f"`compile` the {type(inner).__name__} itself; engine='horovod' "
            "lets Horovod carry the exchanges."
        )


def check_callbacks(callbacks: Any) -> None:
    """Refuses callbacks of Horovod, whose work the strategy does.

    Args:
        callbacks: what `fit` is given: one, several or None.

    Raises:
        ValueError: naming the first of them; says what to do.
    """
    for callback in tf.nest.flatten(getattr(callbacks, "callbacks", callbacks)):
        if _of_horovod(callback):
            raise ValueError(
                f"Callback hvd.callbacks.{type(callback).__name__} does again "
                "what the strategy does: it gives all ranks the same initial "
                "values, averages metrics, and needs no larger learning rate. "
                "Leave it out."
            )


def _of_horovod(thing: Any) -> bool:
    modules = [base.__module__ for base in type(thing).__mro__]
    return any(name.partition(".")[0] == "horovod" for name in modules)
