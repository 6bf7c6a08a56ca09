# SPDX-License-Identifier: Apache-2.0
"""One optimizer for dense layers and another one for tables."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.optimizers import rules
from tfdist_ext.optimizers.keras_versions import unscalable
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import Optimizer
from tfdist_ext.type_names import Variable

keras = tf.keras

Pairs = list[tuple[Any, Any]]
# Stands for the Keras optimizer, the next base class of `Split`.
_Optimizer: Any = object


class _Keras3Updates(_Optimizer):
    """Updates by the parts, in the steps of Keras 3."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        if self.loss_scale_factor is not None:
            grads = unscalable(grads)
        return super().apply(grads, trainable_variables)

    def _backend_apply_gradients(
        self, grads: Sequence[Gradient], trainable_variables: Sequence[Any]
    ) -> None:
        pairs = zip(grads, trainable_variables, strict=True)
        for part, mine in self.divide(pairs):
            if mine:
                values, variables = zip(*mine, strict=True)
                part._backend_apply_gradients(list(values), list(variables))
        for each in self.table_optimizers:
            each._iterations.assign_add(1)


class _LegacyUpdates(_Optimizer):
    """Updates by the parts, in the steps of tf_keras."""

    def _compute_current_learning_rate(self) -> None:
        for each in self.table_optimizers:
            each._compute_current_learning_rate()

    def _deduplicate_sparse_grad(self, grads: Any) -> Any:
        return grads  # The parts do so.

    def _internal_apply_gradients(self, grads_and_vars: Any) -> Any:
        for part, mine in self.divide(grads_and_vars):
            if not mine:
                part.iterations.assign_add(1)
                continue
            grads, variables = zip(*mine, strict=True)
            grads = part._clip_gradients(grads)
            grads = part._deduplicate_sparse_grad(grads)
            part._apply_weight_decay(variables)
            part._internal_apply_gradients(
                list(zip(grads, variables, strict=True))
            )
        for own in getattr(self.tables, "table_optimizers", ()):
            own.iterations.assign_add(1)
        return self.iterations.assign_add(1)


# Functions that write and read any object of Keras.
_objects: Any = keras.utils if KERAS_3 else keras.saving
_Updates: Any = _Keras3Updates if KERAS_3 else _LegacyUpdates


@marks.works_over_ranks
@keras.utils.register_keras_serializable(package="tfdist_ext")
class Split(_Updates, keras.optimizers.Optimizer):  # type: ignore[name-defined]
    """Trains tables with one optimizer and all other variables with another.

    Dense layers are equal on all ranks, so any optimizer of Keras can train
    them, also one that cannot train a part of a table, such as Lamb, Adafactor
    or Muon. Tables are the weights of the layers of `tfdist_ext.layers` that
    hold rows; their biases, and `keras.layers.Embedding`, are other variables.
    The division is the same at any number of ranks and in one process.

        optimizer = tfdist_ext.optimizers.Split(
            dense=keras.optimizers.Lamb(1e-3),
            tables=tfdist_ext.optimizers.Adagrad(0.05),
        )

    Each optimizer clips, decays and averages its own variables, accumulates
    gradients and has its own learning rate. `global_clipnorm` of `dense` is
    the norm of the dense gradients only.

    Attributes:
        dense: the optimizer of dense variables.
        tables: the optimizer of tables.
        learning_rate: that of `dense`, which callbacks change. Change that of
            the tables by `tables.learning_rate`.
        table_optimizers: `dense`, `tables` and the optimizers of single tables.
        parts: `dense` and `tables`.

    Args:
        dense: a Keras optimizer, its name, or its serialized form.
        tables: one of `tfdist_ext.optimizers`, the Keras optimizer of the same
            name, its name, or its serialized form.
        name: the name of the optimizer.
        loss_scale_factor: the factor of the loss, in Keras 3; see
            `keras.optimizers.Optimizer`. The gradients of both optimizers are
            divided by it.

    Raises:
        ValueError: if `dense` or `tables` cannot be used, or has a
            `loss_scale_factor` of its own.
    """

    # Keras's constructor may set the learning rate, which is that of `dense`.
    _is_made = False

    def __init__(
        self,
        dense: Optimizer,
        tables: Optimizer,
        name: str = "split",
        loss_scale_factor: float | None = None,
    ) -> None:
        if KERAS_3:
            super().__init__(
                learning_rate=0.0,
                name=name,
                loss_scale_factor=loss_scale_factor,
            )
        else:
            super().__init__(name=name, jit_compile=False)
            if loss_scale_factor is not None:
                raise ValueError(
                    "Argument `loss_scale_factor` of Split needs Keras 3. "
                    f"Received: loss_scale_factor={loss_scale_factor}. Leave "
                    "it out, or wrap Split by tf.keras.mixed_precision."
                    "LossScaleOptimizer."
                )
        self.dense = _dense_optimizer(dense)
        self.tables = _optimizer_of_tables(tables)
        for argument, part in (("dense", self.dense), ("tables", self.tables)):
            factor = getattr(part, "loss_scale_factor", None)
            if factor is not None:
                raise ValueError(
                    f"Argument `{argument}` of Split has loss_scale_factor="
                    f"{factor}, but the loss is scaled once. Give the factor "
                    "to Split."
                )
        self._is_made = True

    @property
    def parts(self) -> tuple[Any, Any]:
        return self.dense, self.tables

    @property
    def table_optimizers(self) -> list[Any]:
        own = getattr(self.tables, "table_optimizers", ())
        return [self.dense, self.tables, *own]

    @property
    def variables(self) -> Any:
        """Counters and slots, also those of the parts."""
        found = super().variables
        for each in self.table_optimizers if self._is_made else ():
            found += list(each.variables)
        return found

    # Keras's files have the variables of each part in a place of their own.
    def save_own_variables(self, store: Any) -> None:
        for i, variable in enumerate(self._variables):
            store[str(i)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        for i, variable in enumerate(self._variables):
            variable.assign(store[str(i)])

    @property
    def learning_rate(self) -> Any:
        return self.dense.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        if self._is_made:
            self.dense.learning_rate = learning_rate

    def part_of(self, variable: Variable) -> Any:
        """Returns `tables` for a table, else `dense`.

        Args:
            variable: a TensorFlow or Keras variable.
        """
        return self.tables if marks.is_table(variable) else self.dense

    def divide(self, pairs: Iterable[Any]) -> list[tuple[Any, Pairs]]:
        """Returns `dense` and `tables`, each with its pairs.

        Args:
            pairs: pairs of a gradient and its variable.
        """
        pairs = list(pairs)
        return [
            (part, [pair for pair in pairs if self.part_of(pair[1]) is part])
            for part in self.parts
        ]

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the slots of both optimizers.

        Args:
            variables: all variables that are to be trained.
        """
        if getattr(self, "_built", False):
            return
        variables = list(variables)
        super().build(variables)
        for part, mine in self.divide((None, each) for each in variables):
            part.build([variable for _, variable in mine])
        self._built = True

    def finalize_variable_values(self, var_list: Sequence[Variable]) -> None:
        """Sets variables to their moving averages, where a part has them.

        Args:
            var_list: all variables that were trained.
        """
        for part, mine in self.divide((None, each) for each in var_list):
            part.finalize_variable_values([variable for _, variable in mine])

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that create this optimizer again."""
        config: dict[str, Any] = {
            "name": self.name,
            "dense": _objects.serialize_keras_object(self.dense),
            "tables": _objects.serialize_keras_object(self.tables),
        }
        if KERAS_3 and self.loss_scale_factor is not None:
            config["loss_scale_factor"] = self.loss_scale_factor
        return config


def _from_config(optimizer: Any) -> Any:
    # `keras.optimizers.get` does not know every optimizer of Keras.
    if isinstance(optimizer, dict):
        return _objects.deserialize_keras_object(optimizer)
    return optimizer


def _dense_optimizer(optimizer: Any) -> Any:
    found = keras.optimizers.get(_from_config(optimizer))
    legacy = ".optimizers.legacy." in type(found).__module__
    if legacy or hasattr(found, "inner_optimizer") or isinstance(found, Split):
        raise ValueError(
            "Argument `dense` of Split must be an optimizer of "
            f"keras.optimizers. Received: {optimizer!r}. Use one that is not "
            "in optimizers.legacy, and wrap Split, not its parts, by a "
            "LossScaleOptimizer."
        )
    return found


def _optimizer_of_tables(optimizer: Any) -> Any:
    found = rules.row_optimizer(_from_config(optimizer))
    if found is None:
        raise ValueError(
            "Argument `tables` of Split must be one of tfdist_ext.optimizers "
            f"({', '.join(rules.KINDS)}), its Keras counterpart, or its name. "
            f"Received: {optimizer!r}."
        )
    return found
