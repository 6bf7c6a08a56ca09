# SPDX-License-Identifier: Apache-2.0
"""The callback that skips or undoes steps with NaN or infinity."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.callbacks import update_watch
from tfdist_ext.callbacks.update_watch import Pairs
from tfdist_ext.callbacks.update_watch import Snapshot
from tfdist_ext.callbacks.update_watch import StepState
from tfdist_ext.callbacks.update_watch import UpdateWatch
from tfdist_ext.callbacks.update_watch import collectives_of
from tfdist_ext.callbacks.update_watch import inner_optimizer
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.keras_internals import is_built
from tfdist_ext.keras_internals import value_of
from tfdist_ext.optimizers.supported import parts_of
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.tables import placement
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable

keras = tf.keras
_LOG = logging.getLogger("tfdist_ext")


# Columns of the counts, for the loss and for every variable: non-finite numbers
# or rows of the gradient, first such row; non-finite rows after the update,
# first such row. Rows are numbered from 1; 0 means none.
_COLUMNS = 4
_KINDS = ("gradient", "rows")


@dataclasses.dataclass(frozen=True)
class Finding:
    """Numbers of one kind that are not finite.

    Attributes:
        kind: "loss", "gradient", or "rows" for rows of a table after the
            update.
        rank: rank that found them.
        variable: name of the variable, empty for the loss.
        count: number of rows in a table, else of single numbers.
        row: first of the rows in a table, None for what has no rows.
        shared: whether the gradient is already a sum over the ranks.
    """

    kind: str
    rank: int
    variable: str
    count: int
    row: int | None
    shared: bool

    def __str__(self) -> str:
        if self.kind == "loss":
            return f"the loss of rank {self.rank}"
        place = (
            f" (row {self.row} is the first)" if self.row is not None else ""
        )
        unit = "numbers" if self.row is None else "rows"
        what = "the gradient of " if self.kind == "gradient" else ""
        return (
            f"{self.count} {unit} of {what}{self.variable}{place} on rank "
            f"{self.rank}"
        )


class FiniteSteps:
    """Watches the steps of a model, and skips updates with NaN or infinity.

    Args:
        watch: the model's update watch.
        collectives: collectives of the model's strategy; None in one process.
        write: called with this rank's part of a batch that is not finite: the
            names, then as many arrays.
    """

    def __init__(
        self,
        watch: UpdateWatch,
        collectives: Collectives | None,
        write: Callable[..., None],
    ) -> None:
        self._collectives = collectives
        # Whether the ranks are in different steps.
        self._alone = _steps_alone(collectives)
        self._write = write
        self._variables: list[Variable] = []
        self._shared: list[bool] = []
        self._state: Any = None
        self._any: Any = None
        watch.add(self._around)

    def has_findings(self) -> bool:
        """Whether any rank has counted anything since the last `take`."""
        return self._state is not None and bool(self._any.numpy())

    def take(self) -> list[Finding]:
        """Returns and clears the findings of all ranks; all ranks must call."""
        mine = self._state.numpy()
        self._state.assign(tf.zeros_like(mine))
        self._any.assign(False)
        for place, found in enumerate(mine[1:]):
            found[1::2] = [self._id_of(place, row) for row in found[1::2]]
        everyone = tf.constant(mine[np.newaxis])
        first = 0
        if self._alone and self._collectives is not None:
            first = self._collectives.group.rank
        elif self._collectives is not None:
            everyone = self._collectives.all_gather(everyone, "not finite")
        findings = []
        for rank, (loss, *variables) in enumerate(everyone.numpy(), first):
            if loss[0]:
                findings += [Finding("loss", rank, "", 1, None, False)]
            for place, found in enumerate(variables):
                findings += self._of(rank, place, found)
        return findings

    def _of(self, rank: int, place: int, found: np.ndarray) -> list[Finding]:
        variable = self._variables[place]
        spec = marks.shard_spec(variable)
        name = f"'{getattr(variable, 'path', variable.name)}'"
        name = name if spec is None else f"table '{spec.table}'"
        return [
            Finding(
                kind,
                rank,
                name,
                int(count),
                int(row) - 1 if row else None,
                self._shared[place],
            )
            for kind, count, row in zip(
                _KINDS, found[::2], found[1::2], strict=True
            )
            if count
        ]

    def _id_of(self, place: int, row: int) -> int:
        """Converts a local row into an id; both are numbered from 1."""
        spec = marks.shard_spec(self._variables[place])
        of_table = not self._shared[place]  # also rows of a kept gradient
        if not row or of_table or spec is None or spec.cell is None:
            return row
        ids = placement.ids_of_part(
            spec.cell[0], spec.row_parts, spec.rows, row - 1, row
        )
        return int(ids[0]) + 1

    def _around(
        self, watch: UpdateWatch, pairs: Pairs, update: Callable[[], object]
    ) -> None:
        self._prepare([variable for _, variable in pairs])
        own = [_own_part(gradient) for gradient, _ in pairs]
        self._shared = [part is None for part in own]
        loss = tf.zeros([]) if watch.loss is None else watch.loss
        step = self._collectives.step if self._collectives else None
        if step is not None and step.asynchronous:
            # The gradients of tables have no rows yet.
            for each in step.row_gradients:
                zeros = tf.reduce_sum(tf.zeros_like(each.values) * each.values)
                loss += tf.cast(zeros, loss.dtype)
        before = [_of_numbers(loss)]
        for part, (gradient, _) in zip(own, pairs, strict=True):
            before.append(_of_gradient(gradient if part is None else part))
        fine = self._all_finite(before, "not finite/gradients")
        internals.run_if(fine, update)
        after = [_NOTHING, *(_of_rows(g, v) for g, v in pairs)]
        fine = tf.logical_and(fine, self._all_finite(after, "not finite/rows"))
        new = tf.concat([tf.stack(before), tf.stack(after)], axis=1)
        self._state.assign(tf.where(self._state > 0, self._state, new))
        self._any.assign(tf.logical_or(self._any, tf.logical_not(fine)))
        batch = dict(_named("batch", watch.data))
        tf.cond(fine, lambda: True, lambda: self._write_batch(batch))

    def _write_batch(self, batch: dict[str, tf.Tensor]) -> bool:
        write = functools.partial(self._write, list(batch))
        tf.numpy_function(write, list(batch.values()), [])
        return True

    def _prepare(self, variables: list[Variable]) -> None:
        if self._state is not None:
            return
        self._variables = variables
        options = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.NONE,
        }
        with tf.init_scope():
            zeros = np.zeros([len(variables) + 1, _COLUMNS], np.int64)
            self._state = tf.Variable(zeros, **options)
            self._any = tf.Variable(False, **options)

    def _all_finite(self, counts: list[tf.Tensor], label: str) -> tf.Tensor:
        """Whether no rank has counted anything."""
        mine = tf.reduce_sum(tf.stack(counts)) > 0
        if self._alone:
            return tf.logical_not(mine)
        return sum_over_ranks(tf.cast(mine, tf.float32), label) == 0.0


def _steps_alone(collectives: Collectives | None) -> bool:
    return collectives is not None and collectives.requests is not None


def _named(name: str, data: Nest) -> Iterator[tuple[str, tf.Tensor]]:
    """Yields the tensors of a batch, named by their paths in it."""
    if tf.is_tensor(data) and not isinstance(
        data, tf.__internal__.CompositeTensor
    ):
        yield name, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _named(f"{name}/{key}", value)
    elif isinstance(data, list | tuple):
        for place, value in enumerate(data):
            yield from _named(f"{name}/{place}", value)
    elif isinstance(data, tf.__internal__.CompositeTensor):
        parts = tf.nest.flatten(data, expand_composites=True)
        yield from _named(name, parts)


_NOTHING = np.zeros([2], np.int64)


def _of_numbers(values: tf.Tensor) -> tf.Tensor:
    """int64 `[2]`: number of values that are not finite, and 0 for no row."""
    wrong = tf.logical_not(tf.math.is_finite(values))
    return tf.stack([tf.math.count_nonzero(wrong), 0])


def _of_table(rows: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """int64 `[2]`: number of non-finite rows, and the first one plus 1."""
    width = tf.range(1, tf.rank(values))
    fine = tf.reduce_all(tf.math.is_finite(values), axis=width)
    wrong = tf.boolean_mask(tf.cast(rows, tf.int64), tf.logical_not(fine))
    # The minimum of an empty tensor is the largest number of its dtype.
    first = tf.where(tf.size(wrong) > 0, tf.reduce_min(wrong) + 1, 0)
    return tf.stack([tf.size(wrong, tf.int64), first])


def _own_part(gradient: Gradient) -> TensorOrSlices | None:
    """This rank's part of a gradient; None if only the sum is known."""
    if marks.deferred_rows(gradient) is not None:
        return gradient
    if marks.gradient_spec(gradient) is not None:
        return None
    values = getattr(gradient, "values", gradient)
    if marks.is_reduced(values):
        return marks.own_part(values)
    return gradient


def _of_gradient(gradient: Gradient) -> tf.Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        return _of_table(gradient.indices, gradient.values)
    return _of_numbers(gradient)


def _of_rows(gradient: Gradient, variable: Variable) -> tf.Tensor:
    """Counts the non-finite rows among those that an update has changed."""
    kept = marks.deferred_rows(gradient) is not None  # Others apply it later.
    if kept or not isinstance(gradient, tf.IndexedSlices):
        return tf.constant(_NOTHING)
    with sharded_variable.reads_allowed():
        values = tf.gather(value_of(variable), gradient.indices)
    return _of_table(gradient.indices, values)


_SHOWN = 6  # most findings in a message


class NanGuard(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Prevents NaN and infinity from entering the model, on all ranks.

    If the loss or the gradients of a step are not finite on any rank, no rank
    makes the update. A message, the same on every rank, names what was not
    finite: the ranks, the tables, the rows and the batch. Every rank writes its
    part of the batch into a file. Training goes on with the next batch at a
    lower learning rate. The metrics of the epoch leave that step out.

    With `rollback`, the model and the optimizer, dynamic vocabularies included,
    return to their state of `every` to `2 * every` steps before, because
    training has often begun to diverge before the first NaN. This needs memory
    for two copies of this rank's part of the state. The position in the data is
    not rolled back.

    Give it to `fit` on every rank:

        model.fit(data, callbacks=[NanGuard(directory="bad_batches")])

    Args:
        rollback: whether to return to an earlier state. Otherwise the state of
            the last good step stays, and rows that an update itself has made
            infinite stay infinite.
        every: steps between two copies.
        factor: number that the learning rate is multiplied by; 1 leaves it
            unchanged.
        directory: folder of the batches, which each rank writes as
            `batch-STEP-rank-R.npz`; None writes none.
        most: number of such steps after which training ends with an error.

    Attributes:
        faults: messages of these steps so far, in order.

    Raises:
        ValueError: an argument is out of range. In `fit`: the learning rate is
            a schedule and `factor` is not 1, or XLA compiles the model.
        RuntimeError: in `fit` on every rank, after `most` such steps.
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

    def set_model(self, model: Model) -> None:
        """Begins to watch a model that `fit` is about to train."""
        super().set_model(model)
        self._check(model)
        collectives = collectives_of(model)
        self._collectives = collectives
        self._rank = collectives.group.rank if collectives else 0
        self._step = 0
        self._epoch = 0
        self._copies: list[tuple[int, Any]] = []
        self._step_state: StepState | None = None
        self._logs: dict[str, Any] = {}
        self._steps = FiniteSteps(
            update_watch.watch_of(model), collectives, self._write
        )

    def _check(self, model: Model) -> None:
        if model.jit_compile is True:
            raise ValueError(
                "NanGuard cannot watch steps that XLA compiles: give "
                "`model.compile` jit_compile=False."
            )
        if _steps_alone(collectives_of(model)) and (
            self._rollback or self._factor != 1
        ):
            raise ValueError(
                "NanGuard with consistency.SSP or consistency.BAP leaves out "
                "updates that are not finite, but ranks are in different steps "
                "and cannot go back together. Received: "
                f"rollback={self._rollback}, factor={self._factor}. Use "
                "NanGuard(rollback=False, factor=1)."
            )
        for optimizer in _optimizers(model):
            if self._factor != 1 and _rate_of(optimizer) is None:
                raise ValueError(
                    "NanGuard lowers the learning rate, but that of "
                    f"{type(optimizer).__name__} is a schedule. Use factor=1, "
                    f"or a number. Received: factor={self._factor}"
                )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Records the number of the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Copies the state, if a copy is due."""
        self._begun = batch
        self._step_state = StepState(self.model)
        if not self._rollback:
            return
        late = not self._copies or (
            self._step // self._every > self._copies[-1][0] // self._every
        )
        if late and is_built(inner_optimizer(self.model)):
            copied = (self._step, Snapshot(self.model))
            self._copies = [*self._copies[-1:], copied]

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Checks that all was finite; otherwise restores the state."""
        self._step += batch - self._begun + 1
        logs = logs if logs is not None else {}
        loss = logs.get("loss")
        # The loss in the logs is the mean over all ranks, so ranks agree.
        wrong = loss is not None and not math.isfinite(float(loss))
        if not self._steps.has_findings() and not wrong:
            self._logs = dict(logs)
            return
        findings = self._steps.take() if self._steps.has_findings() else []
        message = self._message(findings, batch)
        done = self._recover()
        logs.update(self._logs)
        self.faults.append(f"{message} {done}")
        if self._rank == 0:
            _LOG.warning("%s", self.faults[-1])
        if len(self.faults) >= self._most:
            raise RuntimeError(
                f"NanGuard ends the training after {len(self.faults)} steps "
                f"that were not finite. The last: {self.faults[-1]}"
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

    def _recover(self) -> str:
        """Restores the state and lowers rates; returns a text that says so."""
        done = "No update was made."
        # This comes before the weights, which include moving means of earlier
        # steps.
        if self._step_state is not None:
            self._step_state.put_back()
        if self._copies:
            step, copied = self._copies[0]
            copied.put_back()
            self._copies = [(self._step, copied)]
            extended = self.model.distribute_strategy.extended
            rounds = getattr(extended, "rounds", None)
            if rounds is not None:
                rounds.drop()
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
        """Writes this rank's part of a batch; called during the step."""
        if self._directory is None:
            return
        # NumPy cannot load object arrays without pickle; TensorFlow passes
        # strings as objects.
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


def _optimizers(model: Model) -> list[Optimizer]:
    """The optimizer of the model, and those of single tables."""
    inner = inner_optimizer(model)
    found = [*parts_of(inner), *getattr(inner, "table_optimizers", ())]
    return list({id(each): each for each in found}.values())


def _rate_of(optimizer: Optimizer) -> float | None:
    """The learning rate, None for a schedule."""
    rate = optimizer.get_config()["learning_rate"]
    return None if isinstance(rate, dict) else float(rate)
