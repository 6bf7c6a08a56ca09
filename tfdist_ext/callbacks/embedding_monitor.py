# SPDX-License-Identifier: Apache-2.0
"""The callback that reports statistics of tables over all ranks."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.callbacks import update_watch
from tfdist_ext.callbacks.update_watch import GradientNorms
from tfdist_ext.callbacks.update_watch import collectives_of
from tfdist_ext.callbacks.update_watch import local_variable
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.sharded_variable import fingerprints
from tfdist_ext.keras_internals import layers_of
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.tables import placement
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Logs
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Variable

keras = tf.keras
_LOG = logging.getLogger("tfdist_ext")


# Most numbers of a table that are read at a time.
_BLOCK = 1 << 22


@dataclasses.dataclass
class RowCounts:
    """Statistics of the rows of a table that this rank counts.

    Attributes:
        rows: number of rows.
        longest: largest norm of a finite row.
        not_finite: number of rows with NaN or infinity.
        changed: number of rows that changed since the last report.
        dead: number of rows that have not changed since the first time.
    """

    rows: int
    longest: float
    not_finite: int
    changed: int
    dead: int

    def numbers(self) -> list[float]:
        """The fields in order."""
        return [float(value) for value in dataclasses.astuple(self)]


class WatchedTable:
    """A table of a model, whose rows are compared with earlier ones.

    Needs 9 bytes per row of this rank, and 8 more until `longest_at_start` is
    called.

    Args:
        spec: placement of the table, with this rank's part.
        variable: TensorFlow or Keras variable of this rank's part.
        collectives: collectives of the strategy; None in one process.
    """

    def __init__(
        self,
        spec: ShardSpec,
        variable: Variable,
        collectives: Collectives | None,
    ) -> None:
        self.name = spec.table
        self.variable = variable
        self.keys = marks.keys_of(variable)
        self._spec = spec
        self._collectives = collectives
        self._marks = self._fingerprints()
        self._ever = np.zeros(len(self._marks), bool)
        self._start: np.ndarray | None = self._own_squares()

    @property
    def counts(self) -> bool:
        """Whether this rank counts its rows; one rank counts each row."""
        if not self._spec.partitioned:
            return self._collectives is None or not self._collectives.group.rank
        return self._spec.cell is not None and self._spec.cell[1] == 0

    @property
    def adds(self) -> bool:
        """Whether this rank's squares are added to the sum over all ranks.

        An unpartitioned table is added by one rank only.
        """
        return self._spec.partitioned or self.counts

    def norms(self) -> np.ndarray:
        """Norms of this rank's rows, float64 `[n]`; all ranks must call."""
        return self._norms_of(self._own_squares())

    def longest(self) -> float:
        """Largest finite norm that this rank counts; all ranks must call."""
        return self._longest_of(self.norms())

    def longest_at_start(self) -> float:
        """Largest norm when the table was made; all ranks must call, once."""
        assert self._start is not None
        norms, self._start = self._norms_of(self._start), None
        return self._longest_of(norms)

    def _longest_of(self, norms: np.ndarray) -> float:
        finite = norms[np.isfinite(norms)]
        return float(finite.max(initial=0.0)) if self.counts else 0.0

    def _own_squares(self) -> np.ndarray:
        """Sums of squares over this rank's columns, float64 `[n]`, by row."""
        return np.concatenate(
            [np.zeros([0])]
            + [_squares(_as_floats(block)) for block in self._blocks()]
        )

    def _norms_of(self, squares: np.ndarray) -> np.ndarray:
        if self._spec.column_parts > 1:
            assert self._collectives is not None
            squares = self._collectives.sum_over_peers(
                tf.constant(squares),
                self._spec.row_peers,
                f"{self.name}/norms",
            ).numpy()
        norms: np.ndarray = np.sqrt(squares[: self._rows()])
        return norms

    def look(self) -> RowCounts:
        """Counts rows and records their fingerprints; all ranks must call."""
        norms = self.norms()
        before, self._marks = self._marks, self._fingerprints()
        changed = self._marks != before
        self._ever |= changed
        finite = np.isfinite(norms)
        if not self.counts:
            return RowCounts(0, 0.0, 0, 0, 0)
        return RowCounts(
            len(norms),
            float(norms[finite].max(initial=0.0)),
            int(len(norms) - finite.sum()),
            int(changed.sum()),
            int(len(norms) - self._ever.sum()),
        )

    def _rows(self) -> int:
        """Number of rows without padding."""
        spec = self._spec
        if spec.cell is None:
            return 0
        return len(
            placement.ids_of_part(spec.cell[0], spec.row_parts, spec.rows)
        )

    def _fingerprints(self) -> np.ndarray:
        found = [fingerprints(block) for block in self._blocks()]
        found = [np.zeros([0], np.uint64), *found]
        return np.concatenate(found)[: self._rows()]

    def _blocks(self) -> list[tf.Tensor]:
        rows, dim = self._spec.local_shape
        with sharded_variable.reads_allowed():
            whole = local_variable(self.variable).read_value()
        step = max(1, _BLOCK // max(dim, 1))
        return [whole[i : i + step] for i in range(0, rows, step)]


def tables_of(
    model: Model, collectives: Collectives | None
) -> list[WatchedTable]:
    """The tables of a model's layers that are of this package.

    Args:
        model: model whose layers are built.
        collectives: collectives of its strategy; None in one process.
    """
    found: dict[int, WatchedTable] = {}
    for layer in layers_of(model):
        if not hasattr(layer, "lookups") or not layer.built:
            continue
        for _, feature in layer.lookups():
            variable = layer.table_variables()[feature.table]
            if id(variable) not in found:
                found[id(variable)] = WatchedTable(
                    feature.spec, variable, collectives
                )
    return list(found.values())


def _squares(block: np.ndarray) -> np.ndarray:
    """Sums of squares of the rows, float64 `[n]`."""
    found = np.einsum("ij,ij->i", block, block).astype(np.float64)
    # Sums of finite numbers may overflow float32.
    large = np.flatnonzero(~np.isfinite(found))
    found[large] = np.square(block[large].astype(np.float64)).sum(axis=1)
    return found


def _as_floats(block: tf.Tensor) -> np.ndarray:
    floats: np.ndarray = tf.cast(block, tf.float32).numpy()
    return floats


# Growth of a norm by this factor is worth a warning.
_GROWTH = 10.0
_NORMS = ("/max_norm", "/gradient_norm")


class EmbeddingMonitor(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Reports on tables every `every` steps, and at the end of every epoch.

    It reports for every table, over all ranks:

    - `max_norm`: norm of the longest finite row;
    - `gradient_norm`: norm of the last step's gradient, over all rows; not
      with `consistency.SSP` and `BAP`, where no rank has it;
    - `touched`: share of the rows that have changed since the last report;
    - `dead`: share of the rows that have not changed since the start of `fit`;
    - `nan`: share of the rows with NaN or infinity;
    - for a dynamic vocabulary, `fill`: share of its capacity that is in use,
      and `admitted` and `evicted`: keys per step since the last report.

    The logs of an epoch have them as "users/max_norm" and so on, for History
    and later callbacks. Rank 0 warns, in the log `tfdist_ext`, of rows with
    NaN, and of norms that are ten times those at the start or at the last
    warning. It warns after the first step and in every report. At the start,
    rows are as the initializer or a checkpoint made them; the gradient is that
    of the first step.

    A report reads every row of the tables once. Ranks exchange a few numbers
    for it, and one number per row of a table with several column parts.

    Give it to `fit` on every rank:

        monitor = EmbeddingMonitor(every=1000, log_dir="logs")
        model.fit(data, callbacks=[monitor])

    Args:
        tables: names of tables; None for all tables of the model.
        every: steps between two reports.
        log_dir: folder into which rank 0 writes the reports for TensorBoard;
            None writes none.

    Attributes:
        reports: the reported values, by step and then by name.

    Raises:
        ValueError: `every` is below 1. In `fit`: the model does not have one of
            the tables; the message names those that it has.
    """

    def __init__(
        self,
        tables: Sequence[str] | None = None,
        every: int = 1000,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(every, int) or every < 1:
            raise ValueError(
                "Argument `every` of EmbeddingMonitor must be at least 1. "
                f"Received: every={every!r}"
            )
        self._names = None if tables is None else list(tables)
        self._every = every
        self._log_dir = log_dir
        self.reports: dict[int, dict[str, float]] = {}
        hold(Need.UPDATE_WATCH, self)

    def set_model(self, model: Model) -> None:
        """Begins to watch a model that `fit` is about to train."""
        super().set_model(model)
        self._collectives = collectives_of(model)
        self._tables: list[WatchedTable] = []
        self._gradients = GradientNorms(
            update_watch.watch_of(model),
            lambda: [table.variable for table in self._find()],
            self._collectives,
        )
        self._step = self._reported = 0
        self._keys: dict[str, dict[str, int]] = {}
        self._known: dict[str, tuple[int, float]] = {}
        self._wants = False

    def on_train_begin(self, logs: Logs = None) -> None:
        """Opens the summary writer of rank 0."""
        self._writer = None
        first = self._collectives is None or not self._collectives.group.rank
        self._is_first = first
        if first and self._log_dir is not None:
            folder = os.fspath(self._log_dir)
            self._writer = tf.summary.create_file_writer(folder)

    def _find(self) -> list[WatchedTable]:
        """The tables, once the model is built."""
        if self._tables or not self.model.built:
            return self._tables
        with tf.init_scope():
            found = tables_of(self.model, self._collectives)
        known = sorted(table.name for table in found)
        if set(self._names or ()) - set(known):
            raise ValueError(
                f"EmbeddingMonitor: the model has the tables {known}. "
                f"Received: tables={self._names}"
            )
        self._tables = [
            table
            for table in found
            if self._names is None or table.name in self._names
        ]
        return self._tables

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Enables gradient norms in the first step and before a report."""
        if not self._step:
            self._find()  # when all callbacks have begun
        self._begun = batch
        due = self._step + 1 - self._reported >= self._every
        due = due or not self._step
        last = self.params.get("steps") in (None, batch + 1)
        if (due or last) != self._wants:
            self._wants = due or last
            self._gradients.want(self._wants)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Makes a report, if one is due."""
        first = not self._step
        self._step += batch - self._begun + 1
        if first:
            self._look_first()
        if self._step - self._reported >= self._every:
            self.report()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Makes a report, and adds its values to the logs of the epoch."""
        if self._step > self._reported:
            self.report()
        if logs is not None and self.reports:
            logs.update(self.reports[self._reported])

    def on_train_end(self, logs: Logs = None) -> None:
        """Closes the summary writer."""
        if self._writer is not None:
            self._writer.close()

    def _look_first(self) -> None:
        """Records norms at the start, and checks the first step's.

        All ranks must call.
        """
        squares = self._gradients.squares()
        mine = np.array(
            [
                [
                    table.longest_at_start(),
                    table.longest(),
                    squares[i] if table.adds else 0.0,
                ]
                for i, table in enumerate(self._tables)
            ],
            np.float64,
        ).reshape(1, len(self._tables), 3)
        if self._collectives is not None:
            mine = self._collectives.all_gather(
                tf.constant(mine), "embedding monitor/first"
            ).numpy()
        for i, table in enumerate(self._tables):
            start, now = (float(mine[:, i, j].max()) for j in (0, 1))
            norm = math.sqrt(mine[:, i, 2].sum())
            self._known[f"{table.name}/max_norm"] = (0, start)
            self._known[f"{table.name}/gradient_norm"] = (self._step, norm)
            if self._is_first:
                self._warn(f"{table.name}/max_norm", now)

    def report(self) -> dict[str, float]:
        """Makes a report now, in a callback of `fit`; all ranks must call.

        Returns:
            The values by name, "users/max_norm" for example.
        """
        squares = self._gradients.squares()
        mine = np.array(
            [
                [*table.look().numbers(), squares[i] if table.adds else 0.0]
                for i, table in enumerate(self._tables)
            ],
            np.float64,
        ).reshape(1, len(self._tables), 6)
        if self._collectives is not None:
            everyone = self._collectives.all_gather(
                tf.constant(mine), "embedding monitor"
            )
            mine = everyone.numpy()
        steps = self._step - self._reported
        found: dict[str, float] = {}
        for i, table in enumerate(self._tables):
            total, longest = mine[:, i].sum(0), mine[:, i, 1].max()
            rows, _, wrong, changed, dead, square = total
            found |= {
                f"{table.name}/max_norm": float(longest),
                f"{table.name}/gradient_norm": math.sqrt(square),
                f"{table.name}/touched": changed / max(rows, 1),
                f"{table.name}/dead": dead / max(rows, 1),
                f"{table.name}/nan": wrong / max(rows, 1),
            }
            if math.isnan(square):
                del found[f"{table.name}/gradient_norm"]
            found |= self._of_keys(table, max(steps, 1))
        self._reported = self._step
        self.reports[self._step] = found
        self._log(found)
        return found

    def histogram(
        self, table: str, bins: int = 20
    ) -> tuple[np.ndarray, np.ndarray]:
        """Histogram of the norms of a table's rows; all ranks must call.

        Args:
            table: name of the table.
            bins: number of bins between 0 and the largest norm.

        Returns:
            int64 `[bins]`, the rows of all ranks in each bin, and float64
            `[bins + 1]`, the edges of the bins. Rows that are not finite are
            not counted.

        Raises:
            ValueError: the table is not watched.
        """
        watched = [each for each in self._tables if each.name == table]
        if not watched:
            names = [each.name for each in self._tables]
            raise ValueError(
                f"EmbeddingMonitor watches the tables {names}. Received: "
                f"table={table!r}"
            )
        norms = watched[0].norms()
        norms = norms[np.isfinite(norms)] if watched[0].counts else norms[:0]
        longest = np.array([norms.max(initial=0.0)], np.float64)
        if self._collectives is not None:
            label = f"{table}/histogram"
            longest = self._collectives.all_gather(
                tf.constant(longest), label
            ).numpy()
        edges = np.linspace(0.0, max(longest.max(), 1e-12), bins + 1)
        counts = np.histogram(norms, edges)[0].astype(np.int64)
        if self._collectives is not None:
            (total,) = self._collectives.all_reduce(
                [tf.constant(counts)], label
            )
            counts = total.numpy()
        return counts, edges

    def _of_keys(self, table: WatchedTable, steps: int) -> dict[str, float]:
        """Values of a dynamic vocabulary; empty for other tables."""
        if table.keys is None:
            return {}
        now = table.keys.counts()
        before = self._keys.get(table.name, dict.fromkeys(now, 0))
        self._keys[table.name] = now
        gone = ("evicted", "expired")
        return {
            f"{table.name}/fill": now["rows"] / table.keys.config.capacity,
            f"{table.name}/admitted": (now["admitted"] - before["admitted"])
            / steps,
            f"{table.name}/evicted": sum(now[k] - before[k] for k in gone)
            / steps,
        }

    def _log(self, found: dict[str, float]) -> None:
        if not self._is_first:
            return
        for name, value in found.items():
            self._warn(name, value)
        _LOG.info("Step %d: %s", self._step, found)
        if self._writer is not None:
            with self._writer.as_default():
                for name, value in found.items():
                    tf.summary.scalar(name, value, self._step)
            self._writer.flush()

    def _warn(self, name: str, value: float) -> None:
        """Warns of NaN, and of a norm that has grown."""
        if name.endswith("/nan") and value > 0:
            _LOG.warning("Step %d: %s is %.3g", self._step, name, value)
        if not name.endswith(_NORMS):
            return
        step, known = self._known.get(name, (self._step, 0.0))
        if value > _GROWTH * known > 0:
            _LOG.warning(
                "Step %d: %s is %.3g, in step %d it was %.3g",
                *(self._step, name, value, step, known),
            )
        if value > _GROWTH * known:
            self._known[name] = (self._step, value)
