# SPDX-License-Identifier: Apache-2.0
"""The callback that keeps a model finite, and goes on."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.callbacks import update_watch
from tfdist_ext.callbacks.finite_steps import Finding
from tfdist_ext.callbacks.finite_steps import FiniteSteps
from tfdist_ext.callbacks.snapshots import Beside
from tfdist_ext.callbacks.snapshots import Snapshot
from tfdist_ext.callbacks.update_watch import collectives_of
from tfdist_ext.callbacks.update_watch import inner_optimizer
from tfdist_ext.keras_internals import is_built
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold

keras = tf.keras

_SHOWN = 6  # findings in a message
_LOG = logging.getLogger("tfdist_ext")


class NanGuard(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Keeps NaN and infinity of a step out of the model, on all ranks alike.

    A step whose loss or gradients are not finite on any rank updates nothing
    on any. The message, the same on every rank, names what was not finite:
    ranks, tables, rows and the batch. Every rank writes its part of the batch
    into a file. Training goes on with the next batch, at a lower rate. Metrics
    of the epoch go on without that step.

    With `rollback` model and optimizer, vocabularies that grow included,
    become what they were `every` to `2 * every` steps before: what comes to
    NaN has often left the path before. Two copies of this rank's part of the
    state are held in memory for that. Data goes on, it is not rolled back.

    Give it to `fit` on every rank:

        model.fit(data, callbacks=[NanGuard(directory="bad_batches")])

    Args:
        rollback: whether to go back, or leave the state as the last good
            step made it. Rows that an update itself has made infinite stay
            so without it.
        every: steps between two copies.
        factor: what the learning rate is multiplied with; 1 leaves it.
        directory: of the batches, which each rank writes as
            `batch-STEP-rank-R.npz`; None writes none.
        most: of such steps, after which training ends with an error.

    Attributes:
        faults: messages of the steps so far, in order.

    Raises:
        ValueError: for arguments outside of these; in `fit`, for a learning
            rate that is a schedule where `factor` is not 1, and for a model
            that XLA compiles.
        RuntimeError: in `fit` on every rank, if there are too many.
    """

    def __init__(
        self,
        rollback: bool = True,
        *,
        every: int = 100,
        factor: float = 0.5,
        directory: str | os.PathLike[str] | None = "bad_batches",
        most: int = 10,
    ) -> None:
        super().__init__()
        for name, value in (("every", every), ("most", most)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"Argument `{name}` of NanGuard must be at least 1. "
                    f"Received: {name}={value!r}"
                )
        if not isinstance(factor, float | int) or not 0 < factor <= 1:
            raise ValueError(
                "Argument `factor` of NanGuard must be above 0 and at most 1. "
                f"Received: factor={factor!r}"
            )
        self._rollback, self._every = rollback, every
        self._factor, self._most = factor, most
        self._directory = None if directory is None else os.fspath(directory)
        self.faults: list[str] = []
        hold(Need.UPDATE_WATCH, self)

    def set_model(self, model: Any) -> None:
        """Begins to watch a model that `fit` is about to train."""
        super().set_model(model)
        self._check(model)
        collectives = collectives_of(model)
        self._collectives = collectives
        self._rank = collectives.group.rank if collectives else 0
        self._step = 0
        self._epoch = 0
        self._copies: list[tuple[int, Any]] = []
        self._beside: Beside | None = None
        self._logs: dict[str, Any] = {}
        self._steps = FiniteSteps(
            update_watch.of(model), collectives, self._write
        )

    def _check(self, model: Any) -> None:
        if model.jit_compile is True:
            raise ValueError(
                "NanGuard cannot watch steps that XLA compiles: give "
                "`model.compile` jit_compile=False."
            )
        for optimizer in _optimizers(model):
            if self._factor != 1 and _rate_of(optimizer) is None:
                raise ValueError(
                    "NanGuard lowers the learning rate, but that of "
                    f"{type(optimizer).__name__} is a schedule. Use factor=1, "
                    f"or a number. Received: factor={self._factor}"
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Copies the state, if it is time."""
        self._begun = batch
        self._beside = Beside(self.model)
        if not self._rollback:
            return
        late = not self._copies or (
            self._step // self._every > self._copies[-1][0] // self._every
        )
        if late and is_built(inner_optimizer(self.model)):
            copied = (self._step, Snapshot(self.model))
            self._copies = [*self._copies[-1:], copied]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Looks whether all was finite; else puts the state right."""
        self._step += batch - self._begun + 1
        logs = logs if logs is not None else {}
        loss = logs.get("loss")
        # Of all ranks, so that they agree.
        wrong = loss is not None and not math.isfinite(float(loss))
        if not self._steps.anything() and not wrong:
            self._logs = dict(logs)
            return
        findings = self._steps.take() if self._steps.anything() else []
        message = self._message(findings, batch)
        done = self._put_right()
        logs.update(self._logs)
        self.faults.append(f"{message} {done}")
        if self._rank == 0:
            _LOG.warning("%s", self.faults[-1])
        if len(self.faults) >= self._most:
            raise RuntimeError(
                f"NanGuard has met {len(self.faults)} steps that were not "
                f"finite, and ends the training. The last: {self.faults[-1]}"
            )

    def _message(self, findings: list[Finding], batch: int) -> str:
        findings = sorted(findings, key=lambda each: each.kind != "loss")
        text = [str(finding) for finding in findings[:_SHOWN]]
        if len(findings) > _SHOWN:
            text.append(f"{len(findings) - _SHOWN} more")
        ranks = sorted({f.rank for f in findings if not f.shared})
        origin = ""
        if ranks:
            named = ", ".join(map(str, ranks))
            origin = f" It came from the samples of rank {named}."
        written = ""
        if findings and self._directory is not None:
            written = f" The batch: {self._path('R', self._step)}."
        return (
            f"Not finite in step {self._step} (epoch {self._epoch}, batch "
            f"{batch}): {'; '.join(text) or 'the mean loss'}."
            f"{origin}{written}"
        )

    def _put_right(self) -> str:
        """Puts state and rates right; says what was done."""
        done = "No update was made."
        # Before the weights: those include means, of earlier steps.
        if self._beside is not None:
            self._beside.put_back()
        if self._copies:
            step, copied = self._copies[0]
            copied.put_back()
            self._copies = [(self._step, copied)]
            done = f"Rolled back to step {step}."
        if self._factor == 1:
            return done
        rates = []
        for optimizer in _optimizers(self.model):
            rate = _rate_of(optimizer)
            if rate is not None:
                rates.append(rate * self._factor)
                optimizer.learning_rate = rates[-1]
        return f"{done} Learning rate now {rates[0]:g}."

    def _path(self, rank: object, step: int) -> str:
        assert self._directory is not None
        name = f"batch-{step}-rank-{rank}.npz"
        return os.path.join(self._directory, name)

    def _write(self, names: list[str], *arrays: np.ndarray) -> None:
        """Writes this rank's part of a batch, while the step goes on."""
        if self._directory is None:
            return
        # NumPy reads no objects, as which TensorFlow gives texts.
        found = {
            name: array.astype("S") if array.dtype == object else array
            for name, array in zip(names, arrays, strict=True)
        }
        path = self._path(self._rank, self._step + 1)
        try:
            os.makedirs(self._directory, exist_ok=True)
            np.savez(path, **found)  # type: ignore[arg-type]
        except OSError as error:
            _LOG.warning("The batch was not written to '%s': %s", path, error)


def _optimizers(model: Any) -> list[Any]:
    """That of the model, and those of single tables."""
    inner = inner_optimizer(model)
    return [inner, *getattr(inner, "table_optimizers", ())]


def _rate_of(optimizer: Any) -> float | None:
    """The learning rate, None of a schedule."""
    rate = optimizer.get_config()["learning_rate"]
    return None if isinstance(rate, dict) else float(rate)
