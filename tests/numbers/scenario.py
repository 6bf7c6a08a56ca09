# SPDX-License-Identifier: Apache-2.0
"""Runs one program on this rank and tells all that came of it."""

from __future__ import annotations

import dataclasses
import logging
import re
import traceback
import warnings
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tests.numbers import registry
from tests.numbers.context import Context


@dataclasses.dataclass
class Outcome:
    """What became of a program on one rank.

    Attributes:
        values: the arrays that it returned, by name.
        error: the text of the exception that ended it, or nothing.
        trace: of that exception.
        warnings: texts of warnings and of what was logged.
    """

    values: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    error: str = ""
    trace: str = ""
    warnings: list[str] = dataclasses.field(default_factory=list)


class _Log(logging.Handler):
    """Keeps what is logged as a warning."""

    def __init__(self, texts: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def run(strategy: Any, folder: Any, case: registry.Case) -> Outcome:
    """Runs a program in one of its settings.

    Args:
        strategy: ours; None for one process of stock Keras.
        folder: where the program may write.
        case: which program, and how.
    """
    each = registry.programs(f"^{re.escape(case.name)}$")[case.name]
    tf.keras.utils.set_random_seed(zlib.crc32(case.name.encode()))
    context = Context(strategy, case.tables, case.batches, folder)
    outcome = Outcome()
    handler = _Log(outcome.warnings)
    loggers = [logging.getLogger("tfdist_ext"), tf.get_logger()]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            _fill(outcome, each, context)
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
    outcome.warnings += [str(each.message) for each in caught]
    return outcome


def _fill(outcome: Outcome, each: registry.Program, context: Context) -> None:
    try:
        values = each.run(context)
        outcome.values = {k: np.asarray(v) for k, v in values.items()}
    except Exception as error:
        outcome.error = f"{type(error).__name__}: {error}"
        outcome.trace = traceback.format_exc()
