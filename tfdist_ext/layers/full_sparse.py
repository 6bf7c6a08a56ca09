# SPDX-License-Identifier: Apache-2.0
"""A fully connected layer for huge, sparsely used inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.keras_internals import converted
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.keras_internals import symbolic
from tfdist_ext.keras_internals import value_of
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.layers import sparse_layer
from tfdist_ext.layers.sparse_layer import OneTable
from tfdist_ext.tables import checks
from tfdist_ext.tables import problem
from tfdist_ext.tables import table_config
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import RegularizerLike
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras

_NO_REGULARIZER = (
    "`kernel_regularizer` needs the whole kernel on every rank: use it with "
    "sharding='data_parallel', or regularise with the optimizer's "
    "weight_decay. Received: "
)


@keras.utils.register_keras_serializable(package="tfdist_ext")
class FullSparse(OneTable):
    """Computes `activation(inputs @ kernel + bias)` for sparse inputs.

    A dense layer for sparse inputs of 2^18 to 2^22 columns. For each sample
    it sums the kernel rows of the sample's ids, multiplied by their weights.
    Under a `HybridParallelStrategy` the kernel is partitioned over the ranks.

    An input is one of:

    * SparseTensor `[batch, input_dim]`; the column indices are ids, and the
      values are weights;
    * floats `[batch, input_dim]`, for example from a `CategoryEncoding`: the
      same matrix as a dense tensor, most of which is zeros;
    * int32 or int64 ids `[batch]` or `[batch, k]`, whose weights are 1;
    * RaggedTensor of ids `[batch, None]`, whose weights are 1, or a pair
      (ragged ids, ragged float weights);
    * a list of these with equal batch sizes, whose results are summed.

    Inputs of more dimensions have one output for each list of ids in the last
    dimension, as in Dense layers: ids `[batch, length, k]` give `[batch,
    length, units]`, and ragged ids `[batch, None, None]` give a RaggedTensor.

    If an id repeats within a sample, its weights are added. Weights are data:
    a partitioned kernel computes no gradient for them.

    Args:
        units: width of the output.
        input_dim: number of rows of the kernel; may be omitted for
            SparseTensors of statically known width.
        activation: a Keras activation or its name; None is linear.
        use_bias: whether to add a bias.
        kernel_initializer: a Keras initializer or its name, see
            `tfdist_ext.embedding.initial_rows`.
        bias_initializer: a Keras initializer, its name, or a constant; None
            is the constant 1 / units.
        kernel_regularizer: a Keras regularizer; allowed only with
            `sharding="data_parallel"`.
        bias_regularizer: a Keras regularizer.
        binary_values: whether every value of a SparseTensor counts as 1; if
            so, values are not sent.
        sharding: "row_wise" (ids are sent to the owner of their row),
            "column_wise" (every rank holds some columns of all rows),
            "table_wise" (one rank holds the entire kernel), "data_parallel"
            (an ordinary mirrored variable), a `TablePlacement`, or "auto" (see
            `tfdist_ext.plan`). "row", "column", "table" and "replicated" are
            short names of the first four.
        prefetch_ids: whether ids are exchanged one step ahead, see
            `preprocess`.
        out_of_range: "error" raises an error on every rank, "ignore" drops
            the id.
        max_norm: the largest Euclidean norm of a row, see `TableConfig`.
        storage: the device of the kernel, see `TableConfig`.
        **kwargs: arguments of a Keras layer, and `wire_dtype`,
            `wire_rounding` and `wire_packing`, which set the wire format of
            results, see `tfdist_ext.embedding.feature.Wire`.

    Raises:
        ValueError: if an argument has a value that is not allowed.
    """

    _like_keras: bool = False  # it is used in place of sparse products

    def __init__(
        self,
        units: int,
        input_dim: int | None = None,
        activation: Callable[[tf.Tensor], tf.Tensor] | str | None = None,
        use_bias: bool = True,
        kernel_initializer: InitializerLike = "zeros",
        bias_initializer: InitializerLike = None,
        kernel_regularizer: RegularizerLike = None,
        bias_regularizer: RegularizerLike = None,
        binary_values: bool = False,
        sharding: checks.Placement | str | TablePlacement = "auto",
        prefetch_ids: bool = False,
        out_of_range: checks.OutOfRange = "error",
        **kwargs: Any,
    ) -> None:
        wire = Wire.taken_from(kwargs)
        super().__init__(
            wire=wire,
            prefetch_ids=prefetch_ids,
            sharding=sharding,
            out_of_range=out_of_range,
            **kwargs,
        )
        where = f"layer '{self.name}'"
        self.units = checks.integer("units", units, 1, where)
        self.input_dim = _rows(input_dim, units, where)
        self.activation = keras.activations.get(activation)
        self.use_bias = use_bias
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        if bias_initializer is None:
            bias_initializer = 1.0 / units
        if isinstance(bias_initializer, float | int):
            bias_initializer = keras.initializers.Constant(bias_initializer)
        self.bias_initializer = keras.initializers.get(bias_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.bias_regularizer = keras.regularizers.get(bias_regularizer)
        self.binary_values = binary_values
        if kernel_regularizer is not None and not self._is_whole:
            raise ValueError(_NO_REGULARIZER + f"sharding={self.sharding!r}.")

    def __call__(
        self, inputs: TensorLike, *args: Any, **kwargs: Any
    ) -> tf.Tensor:
        if self.input_dim is None:
            self.input_dim = sparse_inputs.width_of(inputs, self.name)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: Shape) -> None:
        """Creates the bias and this rank's shard of the kernel.

        Args:
            input_shape: the shape of the input, or a list of shapes.
        """
        if self.input_dim is None:
            raise ValueError(
                f"Layer '{self.name}' needs `input_dim` before it is built."
            )
        self.kernel = self._add_table(
            "kernel",
            self._place(input_shape),
            self.kernel_initializer,
            max_norm=self.max_norm,
            regularizer=self.kernel_regularizer,
        )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                dtype="float32",
                **sparse_layer.KEEP_DTYPE,
            )
        self.built = True

    def table_variables(self) -> list[Variable]:
        """Returns this rank's part of each table, by its `Feature.table`."""
        return [self.kernel]

    def describe(self, input_shape: Shape) -> FeatureConfig:
        """Returns the layer's feature and table, for the planner."""
        rows = self.input_dim
        assert rows is not None
        table = TableConfig(
            self.name,
            rows,
            self.units,
            combiner="sum",
            placement=self.sharding,
            storage=self.storage,
        )
        outer = sparse_layer.inner_sizes(input_shape)[:-1]
        hotness = problem.hotness(input_shape, rows)
        return FeatureConfig(
            self.name,
            table,
            (None, *outer, None),
            (None, *outer, self.units),
            hotness=hotness and hotness * sparse_layer.product(outer),
        )

    def call(self, inputs: TensorLike) -> tf.Tensor:
        """Looks up and sums kernel rows, then adds bias and activation.

        Args:
            inputs: see the class, or the result of `preprocess`.

        Returns:
            The output, `[batch, units]` or a sequence, see the class, in the
            layer's compute dtype.
        """
        if is_symbolic_build():
            return id_layout.zeros(self._layouts(inputs)[0], self.units)
        (pooled,) = self._look_up(inputs)
        return self.finish(pooled, self._layouts(inputs)[0])

    def _ids(self, inputs: TensorLike) -> list[list[Ids]]:
        return [self.ids_of(inputs)]

    def _layouts(self, inputs: TensorLike) -> list[Layout]:
        if prefetched_ids.is_prefetched(inputs):
            return list(inputs.layouts)
        return [self.layout_of(inputs)]

    def layout_of(self, inputs: TensorLike) -> Layout:
        """Returns the layout of the results (for `SharedExchange`)."""
        while isinstance(inputs, list | tuple):
            inputs = inputs[0]
        return sparse_inputs.layout_of(inputs, False, self.name)

    def _own_variables(self) -> dict[str, Variable]:
        own = {"kernel": self.kernel, "bias": self.bias}
        return {name: each for name, each in own.items() if each is not None}

    def ids_of(self, inputs: TensorLike) -> list[Ids]:
        """Returns the ids of every summed input (for `SharedExchange`)."""
        return sparse_inputs.features_of(
            inputs, self.input_dim, self.binary_values, self.name
        )

    def finish(self, pooled: tf.Tensor, layout: Layout) -> TensorLike:
        """Adds bias and activation to pooled rows (for `SharedExchange`).

        Args:
            pooled: float32 `[lists, units]`, the summed kernel rows.
            layout: the layout of the results.
        """
        if self.bias is not None:
            # Keras 3 would round `self.bias` in mixed precision; the variable
            # itself is read in its own dtype.
            pooled = pooled + tf.convert_to_tensor(value_of(self.bias))
        pooled.set_shape([None, self.units])
        activation = converted(self.activation)
        found = activation(tf.cast(pooled, self.compute_dtype))
        return id_layout.arranged(found, layout)

    def compute_output_shape(
        self, input_shape: Shape
    ) -> tuple[int | None, ...]:
        """Returns `(batch, units)`, or `(batch, ..., units)` of sequences."""
        batch, *rest = sparse_inputs.sizes_of(input_shape) or [None]
        return (batch, *rest[:-1], self.units)

    def compute_output_spec(
        self, inputs: TensorLike, **kwargs: Any
    ) -> tf.keras.KerasTensor:
        """Returns the symbolic output (Keras 3)."""
        first = tf.nest.flatten(inputs)[0]
        shape = self.compute_output_shape(first.shape)
        ragged = len(shape) > 2 and getattr(first, "ragged", False)
        return symbolic(shape, self.compute_dtype, ragged)

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
        config = super().get_config()
        for name in ("units", "input_dim", "use_bias", "binary_values"):
            config[name] = getattr(self, name)
        for name, module in (
            ("activation", keras.activations),
            ("kernel_initializer", keras.initializers),
            ("bias_initializer", keras.initializers),
            ("kernel_regularizer", keras.regularizers),
            ("bias_regularizer", keras.regularizers),
        ):
            config[name] = module.serialize(getattr(self, name))
        return config


def _rows(input_dim: int | None, units: int, where: str) -> int | None:
    if input_dim is None:
        return None
    table_config.refuse_vocabulary("input_dim", input_dim, where)
    input_dim = checks.integer("input_dim", input_dim, 1, where)
    if units > input_dim:
        warnings.warn(
            f"FullSparse(units={units}, input_dim={input_dim}) has more "
            "columns than rows. Its arguments are in the order of a Dense "
            "layer, not in that of an Embedding.",
            stacklevel=3,
        )
    return input_dim
