# SPDX-License-Identifier: Apache-2.0
"""A run of a step that is compared with another one and then undone."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(eq=False)
class Trial:
    """What is noted while a step is traced or run for a comparison.

    Attributes:
        whole: whether every rank has the whole batch, so that each computes
            what one process computes. Nothing is then reduced over the ranks;
            lookups still ask the ranks that own the rows.
        updates: trainable variables, each with what it is updated by: the
            gradient as the optimizer applies it.
        marker: a device function of this run. `tf.function` traces anew under
            each, so that what is traced for a comparison is never trained.
    """

    whole: bool
    updates: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)

    def marker(self, op: tf.Operation) -> str:
        """Leaves the device of an op as it is."""
        return str(op.device)

    def marking(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which functions are traced for this run only."""
        if tf.executing_eagerly():
            return contextlib.nullcontext()
        marking: contextlib.AbstractContextManager[Any]
        marking = tf.compat.v1.device(self.marker)
        return marking

    def marked(self, function: Any) -> Any:
        """What a replica runs, in a thread of its own, under the marker.

        Args:
            function: given to `Strategy.run`.
        """
        if tf.executing_eagerly():
            return function
        converted = function
        if not hasattr(function, "python_function"):
            autograph = tf.__internal__.autograph
            converted = autograph.tf_convert(
                *(function, autograph.control_status_ctx()),
                convert_by_default=False,
            )

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.marking():
                return converted(*args, **kwargs)

        run.autograph_info__ = {}  # type: ignore[attr-defined]
        return run

    def note(self, variable: Any, arguments: Any) -> None:
        """Notes an update of a variable.

        Args:
            variable: of TensorFlow.
            arguments: of the update; the gradient is the first one.
        """
        value = arguments[0] if arguments else None
        if not variable.trainable or not (
            isinstance(value, tf.IndexedSlices) or tf.is_tensor(value)
        ):
            return
        self.updates.append((variable, value))
