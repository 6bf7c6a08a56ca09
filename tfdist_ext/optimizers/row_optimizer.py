# SPDX-License-Identifier: Apache-2.0
"""The base class of optimizers with fused ops for sparse gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.comm.exchanges import sum_over_ranks
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import value_of
from tfdist_ext.marks import own_optimizer
from tfdist_ext.marks import shard_spec
from tfdist_ext.ops import optimizer_ops
from tfdist_ext.ops.optimizer_ops import RowRule
from tfdist_ext.optimizers.keras_versions import KerasDifferences
from tfdist_ext.optimizers.keras_versions import has_kernel
from tfdist_ext.optimizers.keras_versions import is_bfloat16_table
from tfdist_ext.optimizers.row_clip import CowClip
from tfdist_ext.optimizers.row_clip import as_row_clip
from tfdist_ext.optimizers.row_clip import clipped
from tfdist_ext.optimizers.row_gradients import CollectedUpdates
from tfdist_ext.optimizers.row_gradients import RowUpdate
from tfdist_ext.optimizers.row_gradients import without_duplicates
from tfdist_ext.optimizers.supported import check_supported
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Original
from tfdist_ext.type_names import Rate
from tfdist_ext.type_names import Scalar
from tfdist_ext.type_names import Strategy
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Variable

keras = tf.keras


def limit_row_norms(variable: Variable, max_norm: float) -> None:
    """Limits the norms of a table's rows.

    From now on, an optimizer that would ignore the limit raises an error.

    Args:
        variable: the table, a TensorFlow or Keras variable.
        max_norm: the largest Euclidean norm.
    """
    marks.set_max_norm(variable, max_norm)
    hold(Need.MAX_NORM, variable)


def clip_row_norms(
    variable: tf.Variable, rows: tf.Tensor, max_norm: float, seed: tf.Tensor
) -> None:
    """Scales rows whose norm exceeds a limit down to that limit.

    If several ranks hold columns of a row, its sum of squares is computed over
    these ranks. This takes one exchange of one value per row.

    Args:
        variable: the table or this rank's part of it, `[num_rows, dim]`.
        rows: int64 `[n]`, local rows, each once. Ranks that hold columns of
            the same rows must give them in the same order.
        max_norm: the largest Euclidean norm.
        seed: the seed of stochastic rounding to bfloat16, or None.
    """
    spec = marks.shard_spec(variable)
    whole_rows = spec is None or spec.column_parts == 1
    squares = None
    if not (whole_rows and has_kernel(variable)):
        values = tf.cast(tf.gather(variable, rows), tf.float32)
        squares = tf.reduce_sum(tf.square(values), axis=1)
    if spec is not None and not whole_rows:
        label = f"{spec.table}/norms of rows"
        squares = sum_over_ranks(squares, label, spec.row_peers)
    if has_kernel(variable):
        optimizer_ops.clip_rows(
            variable,
            rows,
            max_norm=max_norm,
            squares=squares,
            rounding_seed=seed,
        )
        return
    norms = tf.sqrt(squares)
    longer = tf.where(norms > max_norm)[:, 0]
    excess = 1 - max_norm / tf.gather(norms, longer)
    excess = excess[:, tf.newaxis] * tf.gather(values, longer)
    excess = tf.cast(excess, variable.dtype)
    variable.scatter_sub(tf.IndexedSlices(excess, tf.gather(rows, longer)))


def refuse_norms_at_build(
    original: Original[T],
    optimizer: Optimizer,
    variables: Sequence[Variable],
    *args: Any,
) -> T:
    _refuse(optimizer, variables)
    return original(optimizer, variables, *args)


def refuse_norms_at_apply(
    original: Original[T],
    optimizer: Optimizer,
    pairs: Iterable[tuple[Gradient, Variable]],
    *args: Any,
    **kwargs: Any,
) -> T:
    pairs = list(pairs)
    _refuse(optimizer, [variable for _, variable in pairs])
    return original(optimizer, pairs, *args, **kwargs)


def _refuse(optimizer: Optimizer, variables: Sequence[Variable]) -> None:
    """Refuses an optimizer that would ignore the norm limit of a table."""
    # A loss scale optimizer passes everything on to its inner optimizer.
    inner = hasattr(optimizer, "inner_optimizer")
    if inner or marks.does_work_over_ranks(optimizer):
        return
    for variable in variables:
        longest = marks.max_norm(variable)
        if longest is not None:
            kind = type(optimizer).__name__
            raise ValueError(
                f"Table '{variable.name}' has max_norm={longest:g}, which "
                f"{type(optimizer).__module__}.{kind} would ignore. Give the "
                "model an optimizer of tfdist_ext.optimizers, or leave out "
                "`max_norm`."
            )


# The update (0), weight decay (1) and the limit of norms (2) need a seed each.
_SEEDS_OF_STEP = 3


@marks.works_over_ranks
class RowOptimizer(KerasDifferences):
    """Mix-in class that precedes a Keras optimizer in the order of bases.

    If a gradient is an IndexedSlices, one op updates its rows and their slots
    in place. This applies to shards and to ordinary variables. Duplicate rows
    are updated once, with the sum of their gradients. Keras's own code applies
    all other gradients.

    Gradients are clipped after the sum over the ranks, by norms of entire
    variables. The result is that of one process with the global batch.

    Tables may be bfloat16. Their slots are float32, and a row is computed in
    float32. Its weights are then rounded up or down at random, such that the
    expectation is exact. `stochastic_rounding=False` rounds to nearest, which
    loses changes below 1/512 of a weight.

    A subclass defines `_rule` and `_slots`.
    """

    # Optimizers of single tables, see `rules.attach_optimizer`.
    table_optimizers: Sequence[RowOptimizer] = ()
    # While Keras applies gradients, collects the updates of rows.
    _collected: CollectedUpdates | None = None

    def __init__(
        self,
        *args: Any,
        stochastic_rounding: bool = True,
        row_clip: CowClip | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.row_clip = as_row_clip(row_clip, type(self).__name__)
        self.stochastic_rounding = stochastic_rounding

    def get_config(self) -> Config:
        config = {
            **super().get_config(),
            "stochastic_rounding": self.stochastic_rounding,
        }
        if self.row_clip is not None:
            config["row_clip"] = dataclasses.asdict(self.row_clip)
        return config

    def build(self, variables: Sequence[Variable]) -> None:
        self._prepare(variables)
        super().build(variables)

    def _prepare(self, variables: Sequence[Variable]) -> None:
        """Refuses bad options, and builds the optimizers of single tables."""
        if any(shard_spec(variable) is not None for variable in variables):
            check_supported(self)
        for variable in variables:
            if marks.keys_of(variable) and getattr(self, "use_ema", None):
                raise ValueError(
                    "Argument `use_ema` is not supported with a dynamic "
                    f"vocabulary: the average of '{variable.name}' would mix "
                    "keys that had the same row. Leave it out."
                )
            if is_bfloat16_table(variable) and getattr(self, "use_ema", None):
                raise ValueError(
                    "Argument `use_ema` is not supported with tables of "
                    f"bfloat16: the average of '{variable.name}' would lose "
                    "most of its changes to rounding. Use float32 tables, or "
                    "leave it out."
                )
        tables: dict[int, tuple[RowOptimizer, list[Variable]]] = {}
        for variable in variables:
            if self._has_own_optimizer(variable):
                own = own_optimizer(variable)
                tables.setdefault(id(own), (own, []))[1].append(variable)
        # Keras tracks this attribute, and saves the optimizers' variables.
        self.table_optimizers = [own for own, _ in tables.values()]
        for own, mine in tables.values():
            self._refuse_with_own_optimizer(own)
            own.build(mine)
            own._require_known(mine)

    def _refuse_with_own_optimizer(self, own: RowOptimizer) -> None:
        """Refuses options that need the slots of every variable here."""
        refused = {"gradient_accumulation_steps": True, "use_ema": not KERAS_3}
        for option, wrong in refused.items():
            if wrong and getattr(self, option, None):
                raise ValueError(
                    f"Argument `{option}` of {type(self).__name__} is not "
                    "supported if a table has an optimizer of its own "
                    f"({type(own).__name__}). Leave one of them out."
                )

    def _require_known(self, variables: Sequence[Variable]) -> None:
        """Refuses a table's optimizer that was built for another model."""
        for variable in variables:
            try:
                self._index_of(variable)
            except KeyError:
                raise ValueError(
                    f"The optimizer {type(self).__name__} of table "
                    f"'{variable.name}' belongs to another model already. "
                    "Make a new one, and a new TableConfig, for every model."
                ) from None

    def _has_own_optimizer(self, variable: Variable) -> bool:
        return own_optimizer(variable) not in (None, self)

    def update_step(
        self, gradient: Gradient, variable: Variable, *learning_rate: Scalar
    ) -> None:
        """Updates one variable.

        Args:
            gradient: tensor or IndexedSlices.
            variable: the variable; under a strategy, the component of this
                replica.
            *learning_rate: the learning rate in Keras 3, nothing in tf_keras.
        """
        if self._has_own_optimizer(variable):
            own = own_optimizer(variable)
            own.update_step(gradient, variable, *own.rate_argument())
            return
        if self.row_clip is not None:
            native = self._native(variable)
            gradient = clipped(self.row_clip, gradient, native)
        longest = marks.max_norm(variable)
        if longest is None:
            self._update_one(gradient, variable, *learning_rate)
            return
        gradient = without_duplicates(gradient)
        self._update_one(gradient, variable, *learning_rate)
        clip_row_norms(
            self._native(variable),
            self._rows_changed(gradient, variable),
            longest,
            self.rounding_seed(variable, use=2),
        )

    def _rows_changed(
        self, gradient: Gradient, variable: Variable
    ) -> tf.Tensor:
        """Returns the rows that an update may change, int64, ascending."""
        if isinstance(gradient, tf.IndexedSlices):
            return tf.cast(gradient.indices, tf.int64)
        return tf.range(variable.shape[0], dtype=tf.int64)

    def _update_one(
        self, gradient: Gradient, variable: Variable, *learning_rate: Scalar
    ) -> None:
        """Updates a variable that has no optimizer of its own."""
        if is_bfloat16_table(variable):
            gradient = _as_slices(gradient)
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, *learning_rate)
            return
        if not has_kernel(variable):
            gradient = without_duplicates(gradient)
            super().update_step(gradient, variable, *learning_rate)
            return
        keys = marks.keys_of(variable)
        if keys is not None:
            keys.reset_slots()
        self._update_rows(
            self._native(variable),
            tf.cast(gradient.indices, tf.int64),
            tf.cast(gradient.values, tf.float32),
            learning_rate[0] if learning_rate else self.learning_rate,
        )

    def _update_rows(
        self,
        variable: tf.Variable,
        rows: tf.Tensor,
        grads: tf.Tensor,
        learning_rate: Rate,
    ) -> None:
        """Updates rows int64 `[n]` of a variable with grads `[n, dim]`."""
        update = RowUpdate(
            self._rule(learning_rate),
            variable,
            [value_of(slot).handle for slot in self._slots_of(variable)],
            rows,
            grads,
            self.rounding_seed(variable),
        )
        if self._collected is None:
            update.apply()
        else:
            self._collected.add(update, self)

    def _rule(self, learning_rate: Rate) -> RowRule:
        """Returns the update of rows."""
        raise NotImplementedError

    def _slots(self) -> list[Sequence[Any]]:
        """Returns the slots of all variables, in the order of the rule."""
        raise NotImplementedError

    def _slots_of(self, variable: Variable) -> list[Variable]:
        return [self._slot(slots, variable) for slots in self._slots()]

    @contextlib.contextmanager
    def _collecting_updates(self) -> Iterator[None]:
        """Applies the updates of rows at the end of the block.

        Those of the tables of a lookup become one op.
        """
        optimizers = [self, *self.table_optimizers]
        collected = CollectedUpdates()
        for optimizer in optimizers:
            optimizer._collected = collected
        try:
            yield
        finally:
            for optimizer in optimizers:
                optimizer._collected = None
        collected.apply()

    def _note_slot(
        self, variable: Variable, slot: Variable, value: float
    ) -> Variable:
        """Stores a slot's initial value, if rows may get other keys."""
        keys = marks.keys_of(variable)
        if keys is not None and slot is not None:
            keys.adopt_slot(self._native(slot), float(value))
        return slot

    def rounding_seed(
        self, variable: Variable, use: int = 0
    ) -> tf.Tensor | None:
        """Returns a seed for each step, variable, rank and use.

        Args:
            variable: the variable whose values are rounded.
            use: a number below `_SEEDS_OF_STEP`, different for each use within
                a step.

        Returns:
            int64 scalar; None if the variable is not rounded stochastically.
        """
        if not (self.stochastic_rounding and is_bfloat16_table(variable)):
            return None
        spec = shard_spec(variable)
        salt = (self._index_of(variable) << 48) + use
        if spec is not None:
            salt += spec.rank << 32
        return _SEEDS_OF_STEP * tf.cast(self.iterations, tf.int64) + salt

    def _slot(self, slots: Sequence[Any], variable: Variable) -> Variable:
        return slots[self._index_of(variable)]

    def _apply_weight_decay(self, variables: Sequence[Variable]) -> None:
        """Decays entire variables; tables are updated in place, not copied."""
        if not self.weight_decay:
            return
        tf.__internal__.distribute.interim.maybe_merge_call(
            self._decay_all, self._distribution_strategy, variables
        )

    def _decay_all(
        self, strategy: Strategy, variables: Sequence[Variable]
    ) -> None:
        def decay(variable: tf.Variable) -> None:
            if not self._use_weight_decay(variable):
                return
            if has_kernel(variable):
                rate = tf.cast(self.learning_rate, tf.float64)
                optimizer_ops.scale_table(
                    variable,
                    1 - self.weight_decay * rate,
                    rounding_seed=self.rounding_seed(variable, use=1),
                )
            else:
                rate = tf.cast(self.learning_rate, variable.dtype)
                decay = tf.cast(self.weight_decay, variable.dtype)
                variable.assign_sub(variable * decay * rate)

        for variable in variables:
            strategy.extended.update(self._native(variable), decay, group=False)


def _as_slices(gradient: Gradient) -> tf.IndexedSlices:
    """Returns a dense gradient as IndexedSlices of all rows."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    gradient = tf.convert_to_tensor(gradient)
    rows = tf.range(tf.shape(gradient, tf.int64)[0], dtype=tf.int64)
    return tf.IndexedSlices(gradient, rows, tf.shape(gradient))
