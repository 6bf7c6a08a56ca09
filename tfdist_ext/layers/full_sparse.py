# SPDX-License-Identifier: Apache-2.0
"""A fully connected layer for huge, sparsely used inputs."""

from __future__ import annotations

from typing import Any
from typing import Literal

import tensorflow as tf

from tfdist_ext.distribute import collectives as collectives_lib
from tfdist_ext.embedding import input_dist as ids_stage
from tfdist_ext.embedding import lookup as lookup_stage
from tfdist_ext.embedding import output_dist as results_stage
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.sharding import initial_rows
from tfdist_ext.sharding import plan
from tfdist_ext.sharding import sharded_variable
from tfdist_ext.sharding.config import ShardSpec

keras = tf.keras

_SHARDINGS = ("auto", "row", "column", "replicated")
_WIRE_DTYPES = ("float32", "bfloat16", "float16")
_POLICIES = ("error", "ignore")


@keras.utils.register_keras_serializable(package="tfdist_ext")
class FullSparse(keras.layers.Layer):  # type: ignore[name-defined]
    """`activation(sum of the weighted kernel rows of a sample + bias)`.

    The dense layer on a sparse input of 2^18..2^22 columns: `outputs =
    activation(inputs @ kernel + bias)`. Under a `HybridParallelStrategy`
    the kernel is partitioned over the ranks.

    Inputs, all of one batch:
      * SparseTensor `[batch, input_dim]`; ids are the column indices, values
        the weights;
      * int32 or int64 ids `[batch]` or `[batch, k]`, weights one;
      * RaggedTensor of ids `[batch, None]`, weights one, or a pair (ragged
        ids, ragged float weights);
      * a list of these, whose results are summed.

    An id may repeat within a sample; its weights add up.

    Args:
        units: width of the output.
        input_dim: rows of the kernel; may be omitted for SparseTensors of
            known width.
        activation: of Keras; None is linear.
        use_bias: whether to add a bias.
        kernel_initializer: see `tfdist_ext.sharding.initial_rows`.
        bias_initializer: default the constant 1 / units.
        kernel_regularizer: only with `sharding="replicated"`.
        bias_regularizer: of Keras.
        binary_values: count every value of a SparseTensor as one; values
            then never travel.
        sharding: "row" (ids go to the owner of their row), "column" (every
            rank holds some columns of all rows), "replicated" (an ordinary
            mirrored variable) or "auto" (see `tfdist_ext.sharding.plan`).
        wire_dtype: dtype of results and their gradients between ranks. The
            sums over a sample's ids are rounded once, relative error
            at most 2^-8 (bfloat16) or 2^-11 (float16, in its range).
        out_of_range: "error" raises on every rank, "ignore" drops the id.

    Raises:
        ValueError: for arguments outside of these.
    """

    def __init__(
        self,
        units: int,
        input_dim: int | None = None,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "zeros",
        bias_initializer: Any = None,
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        binary_values: bool = False,
        sharding: Literal["auto", "row", "column", "replicated"] = "auto",
        wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        out_of_range: ids_stage.OutOfRange = "error",
        **kwargs: Any,
    ) -> None:
        # Weights are float32 whatever the policy; values must not be cast.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.units = _positive("units", units)
        self.input_dim = (
            None if input_dim is None else _positive("input_dim", input_dim)
        )
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
        _require_one_of("sharding", sharding, _SHARDINGS)
        _require_one_of("wire_dtype", wire_dtype, _WIRE_DTYPES)
        _require_one_of("out_of_range", out_of_range, _POLICIES)
        self.sharding = sharding
        self.wire_dtype = wire_dtype
        self.out_of_range = out_of_range
        if kernel_regularizer is not None and sharding != "replicated":
            raise ValueError(
                "`kernel_regularizer` needs the whole kernel on every rank: "
                "use it with sharding='replicated', or regularise with the "
                f"optimizer's weight_decay. Received: sharding={sharding!r}."
            )
        self.supports_jit = False

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.input_dim is None:
            self.input_dim = _width_of(inputs, self.name)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Creates kernel and bias; the kernel is this rank's shard."""
        if self.input_dim is None:
            raise ValueError(
                f"Layer '{self.name}' needs `input_dim` before it is built."
            )
        self._collectives = collectives_lib.active()
        self.spec = self._make_spec(self.input_dim, input_shape)
        initializer = initial_rows.for_shard(self.kernel_initializer, self.spec)
        with sharded_variable.creating(self.spec):
            self.kernel = self.add_weight(
                name="kernel",
                shape=self.spec.local_shape,
                initializer=initializer,
                regularizer=self.kernel_regularizer,
                dtype="float32",
            )
        self.bias = None
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.units,),
                initializer=self.bias_initializer,
                regularizer=self.bias_regularizer,
                dtype="float32",
            )
        self.built = True

    def _make_spec(self, rows: int, input_shape: Any) -> ShardSpec:
        rank, world_size = 0, 1
        if self._collectives and self.sharding != "replicated":
            rank = self._collectives.group.rank
            world_size = self._collectives.group.world_size
        sharding = self.sharding
        if sharding == "auto":
            hotness = plan.hotness(input_shape, rows)
            sharding = plan.choose_sharding(
                rows, self.units, world_size, hotness
            )
            if sharding == "replicated":
                rank, world_size = 0, 1
        return ShardSpec(
            table=self.name,
            rows=rows,
            dim=self.units,
            placement="column" if sharding == "column" else "row",
            rank=rank,
            world_size=world_size,
        )

    def call(self, inputs: Any) -> tf.Tensor:
        """`input_dist`, `lookup`, `output_dist`, then bias and activation.

        Args:
            inputs: see the class.

        Returns:
            `[batch, units]` in the layer's compute dtype.
        """
        if _is_symbolic_build():
            first = tf.nest.flatten(inputs)[0]
            return tf.zeros([tf.shape(first)[0], self.units])
        features = sparse_inputs.features_of(
            inputs, self.binary_values, self.name
        )
        outputs = self._pooled(features)
        if self.bias is not None:
            # The variable itself: Keras 3 would round it in mixed precision.
            bias = getattr(self.bias, "_value", self.bias)
            outputs = outputs + tf.convert_to_tensor(bias)
        outputs.set_shape([None, self.units])
        outputs = tf.cast(outputs, self.compute_dtype)
        return self.activation(outputs)

    def _pooled(self, features: list[ids_stage.Ids]) -> tf.Tensor:
        collectives = self._collectives
        if collectives is None or self.spec.world_size == 1:
            owned = ids_stage.merge_local(
                features, self.spec.rows, self.out_of_range, self.name
            )
            return lookup_stage.lookup(self.kernel, owned)
        owned, route = ids_stage.input_dist(
            features, self.spec, self.out_of_range, collectives
        )
        pooled = lookup_stage.lookup(self.kernel, owned)
        return results_stage.output_dist(
            pooled,
            route,
            self.spec,
            collectives,
            tf.as_dtype(self.wire_dtype),
        )

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        """`(batch, units)`."""
        while isinstance(input_shape[0], list | tuple | tf.TensorShape):
            input_shape = input_shape[0]
        return (input_shape[0], self.units)

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> Any:
        """The symbolic output (Keras 3)."""
        first = tf.nest.flatten(inputs)[0]
        return keras.KerasTensor(
            (first.shape[0], self.units), dtype=self.compute_dtype
        )

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole kernel; all ranks call, rank 0's file stays."""
        kernel: Any = self.kernel
        if self._collectives and sharded_variable.is_shard(kernel):
            kernel = sharded_variable.gather_to_first(kernel, self._collectives)
        store["kernel"] = kernel
        if self.bias is not None:
            store["bias"] = self.bias

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of the kernel."""
        if sharded_variable.is_shard(self.kernel):
            sharded_variable.assign_part(self.kernel, store["kernel"])
        else:
            self.kernel.assign(store["kernel"])
        if self.bias is not None:
            self.bias.assign(store["bias"])

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config: dict[str, Any] = super().get_config()
        for name in (
            "units",
            "input_dim",
            "use_bias",
            "binary_values",
            "sharding",
            "wire_dtype",
            "out_of_range",
        ):
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


def _is_symbolic_build() -> bool:
    # Under a strategy, Keras 3 builds a model by tracing it in a graph that
    # is never run, with dense placeholders even for sparse inputs.
    graph = tf.compat.v1.get_default_graph()
    return str(getattr(graph, "name", "")).startswith("scratch_graph")


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be a positive integer. Received: "
            f"{name}={value!r}."
        )
    return value


def _require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(
            f"Argument `{name}` must be one of {choices}. Received: "
            f"{name}={value!r}."
        )


def _width_of(inputs: Any, layer: str) -> int:
    """`input_dim` of SparseTensor inputs, from their static shape."""
    values = inputs if isinstance(inputs, list | tuple) else [inputs]
    widths = {
        value.shape[-1] if sparse_inputs.is_sparse(value) else None
        for value in values
    }
    width = widths.pop()
    if widths or width is None:
        raise ValueError(
            f"Layer '{layer}' cannot tell `input_dim`, the number of rows of "
            "its kernel, from its inputs: only SparseTensors of equal, "
            "statically known width tell it. Pass "
            "FullSparse(units, input_dim=...)."
        )
    return int(width)
