# SPDX-License-Identifier: Apache-2.0
"""Models that would train wrongly are refused in their first step."""

from __future__ import annotations

from typing import Any

from tfdist_ext.keras_training import horovod
from tfdist_ext.optimizers import unsupported
from tfdist_ext.sharding import sharded_variable


def check(model: Any) -> None:
    """Refuses an optimizer that would train a model wrongly on ranks.

    It is done in a step because a wrapper of an optimizer (a loss scale) is
    not seen where the optimizer updates its variables.

    Args:
        model: whose step runs; None, or something else, in a step of the
            user's.

    Raises:
        ValueError: saying what to do instead.
    """
    optimizer = getattr(model, "optimizer", None)
    horovod.check_optimizer(optimizer)
    unsupported.check_accumulation(optimizer)
    variables = getattr(model, "trainable_variables", ())
    if optimizer and any(map(sharded_variable.is_shard, variables)):
        unsupported.check_supported(optimizer)


def check_in_one_process(model: Any) -> None:
    """Refuses an optimizer that fails under a strategy of any size.

    Args:
        model: see `check`.

    Raises:
        ValueError: saying what to do instead.
    """
    unsupported.check_accumulation(getattr(model, "optimizer", None))
