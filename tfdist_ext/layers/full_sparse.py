# SPDX-License-Identifier: Apache-2.0
"""A fully connected layer for huge, sparsely used inputs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any
from typing import Literal

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.embedding import frequent_ids
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import OutOfRange
from tfdist_ext.embedding.pooled_lookup import pooled_lookup
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.layers import tables
from tfdist_ext.planner import plan
from tfdist_ext.planner import reduction
from tfdist_ext.prefetch import prefetched_ids
from tfdist_ext.sharding import whole_tables
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.shard_spec import ShardSpec
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.tables.table_config import placement_from_dict
from tfdist_ext.tables.table_config import placement_to_dict

keras = tf.keras

_SHARDINGS = {
    "auto": "auto",
    "row": "row_wise",
    "column": "column_wise",
    "replicated": "data_parallel",
}
_POLICIES = ("error", "ignore")


_NO_REGULARIZER = (
    "`kernel_regularizer` needs the whole kernel on every rank: use it with "
    "sharding='replicated', or regularise with the optimizer's weight_decay. "
    "Received: "
)


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
            mirrored variable), a `TablePlacement`, or "auto" (see
            `tfdist_ext.planner.plan`).
        wire_dtype: dtype of results and their gradients between ranks. The
            sums over a sample's ids are rounded once, relative error
            at most 2^-8 (bfloat16) or 2^-11 (float16, in its range).
        wire_rounding: of a 16-bit wire_dtype: "nearest", or "stochastic",
            whose errors have mean zero and do not add up over steps.
        wire_packing: pack those numbers, without loss: about 15% fewer bytes
            in float32, 30% in bfloat16, for about 20 ns of processor time a
            number. Pays on links below about 1 Gbit/s.
        learn_frequent_ids: count looked-up ids and give frequent ones
            shorter codes: about a quarter fewer bytes of ids for twice the
            time to code them. Pays on slow links.
        prefetch_ids: exchange ids a step ahead, see `preprocess`.
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
        sharding: Literal["auto", "row", "column", "replicated"]
        | TablePlacement = "auto",
        wire_dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        wire_rounding: Literal["nearest", "stochastic"] = "nearest",
        wire_packing: bool = False,
        learn_frequent_ids: bool = False,
        prefetch_ids: bool = False,
        out_of_range: OutOfRange = "error",
        **kwargs: Any,
    ) -> None:
        # Weights are float32 whatever the policy; values must not be cast.
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        self.units = _positive("units", units)
        self.input_dim = _rows(input_dim, units)
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
        if isinstance(sharding, dict):
            sharding = placement_from_dict(sharding)
        if not isinstance(sharding, TablePlacement):
            tables.require_one_of("sharding", sharding, tuple(_SHARDINGS))
        tables.require_one_of("wire_dtype", wire_dtype, tables.WIRE_DTYPES)
        tables.require_one_of("out_of_range", out_of_range, _POLICIES)
        self.sharding = sharding
        # What a plan for several layers says, or the one for this layer.
        self.planned: TablePlacement | None = None
        self._frequent: frequent_ids.FrequentIds | None = None
        self.wire_dtype = wire_dtype
        tables.require_one_of("wire_rounding", wire_rounding, tables.ROUNDINGS)
        self.wire_rounding = wire_rounding
        self.wire_packing = wire_packing
        self.learn_frequent_ids = learn_frequent_ids
        self.prefetch_ids = prefetch_ids
        self.out_of_range = out_of_range
        if kernel_regularizer is not None and sharding != "replicated":
            raise ValueError(_NO_REGULARIZER + f"sharding={sharding!r}.")
        self.supports_jit = False

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if self.input_dim is None:
            self.input_dim = sparse_inputs.width_of(inputs, self.name)
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Creates kernel and bias; the kernel is this rank's shard."""
        if self.input_dim is None:
            raise ValueError(
                f"Layer '{self.name}' needs `input_dim` before it is built."
            )
        self._collectives = collectives_lib.active()
        self.spec = self._make_spec(self.input_dim, input_shape)
        tables.agree([self.feature], self._collectives)
        self.kernel = tables.add_table(
            self,
            "kernel",
            self.spec,
            self.kernel_initializer,
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
                **tables.KEEP_DTYPE,
            )
        self.built = True

    def _make_spec(self, rows: int, input_shape: Any) -> ShardSpec:
        rank, world_size = tables.rank_and_world_size(self._collectives)
        sharding = self._placement(world_size, input_shape)
        if world_size == 1:
            sharding = TablePlacement.data_parallel()
        spec = ShardSpec.of(
            self.name, rows, self.units, sharding, rank, world_size
        )
        self.feature = Feature(
            self.name,
            0,
            spec,
            out_of_range=self.out_of_range,
            deduplicate=sharding.deduplicate,
        )
        return spec

    def _placement(self, world_size: int, input_shape: Any) -> TablePlacement:
        if isinstance(self.sharding, TablePlacement):
            return self.sharding
        if self.planned is None:
            feature = self.describe(input_shape)
            made = plan.plan([feature.table], [feature], world_size)
            self.planned = made.placement_of(self.name)
        return self.planned

    def describe(self, input_shape: Any) -> FeatureConfig:
        """The layer as a planner sees it."""
        rows = self.input_dim
        assert rows is not None
        placement: str | TablePlacement = self.sharding
        if isinstance(placement, str):
            placement = _SHARDINGS[placement]
        table = TableConfig(
            self.name, rows, self.units, combiner="sum", placement=placement
        )
        return FeatureConfig(
            self.name,
            table,
            (None, None),
            (None, self.units),
            hotness=reduction.hotness(input_shape, rows),
        )

    def call(self, inputs: Any) -> tf.Tensor:
        """The pooled lookup, then bias and activation.

        Args:
            inputs: see the class.

        Returns:
            `[batch, units]` in the layer's compute dtype.
        """
        if tables.is_symbolic_build():
            first = tf.nest.flatten(inputs)[0]
            return tf.zeros([tf.shape(first)[0], self.units])
        if self.learn_frequent_ids and self._frequent is None:
            # Not when built: the layers of a SharedExchange need none.
            self._frequent = frequent_ids.for_features(
                [self.feature], self._collectives, self.name
            )
        ids, ahead = tables.prefetched(self, inputs) or (
            [self.ids_of(inputs)],
            None,
        )
        (pooled,) = pooled_lookup(
            ids,
            [self.feature],
            [self.kernel],
            self._collectives,
            tables.wire_of(self),
            self._frequent,
            ahead,
        )
        return self.finish(pooled)

    def preprocess(self, inputs: Any) -> Any:
        """Prepares inputs in the input pipeline.

        To be mapped over a dataset. With `prefetch_ids=True` every step then
        exchanges the ids of the next batch, see
        `DistributedEmbedding.preprocess`; otherwise nothing is changed.

        Args:
            inputs: see the class.

        Returns:
            What the layer takes as its input.
        """
        if self.prefetch_ids:
            return prefetched_ids.bundle([self.ids_of(inputs)])
        return inputs

    def ids_of(self, inputs: Any) -> list[Ids]:
        """The ids of the inputs, which are summed (for `SharedExchange`)."""
        sparse_inputs.refuse_matrix(inputs, self.input_dim, self.name)
        return sparse_inputs.features_of(inputs, self.binary_values, self.name)

    def finish(self, pooled: tf.Tensor) -> tf.Tensor:
        """Bias and activation (for `SharedExchange`)."""
        if self.bias is not None:
            # The variable itself: Keras 3 would round it in mixed precision.
            bias = getattr(self.bias, "_value", self.bias)
            pooled = pooled + tf.convert_to_tensor(bias)
        pooled.set_shape([None, self.units])
        return self.activation(tf.cast(pooled, self.compute_dtype))

    def compute_output_shape(self, input_shape: Any) -> tuple[Any, int]:
        """`(batch, units)`."""
        return (sparse_inputs.batch_of(input_shape), self.units)

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> Any:
        """The symbolic output (Keras 3)."""
        first = tf.nest.flatten(inputs)[0]
        return keras.KerasTensor(
            (first.shape[0], self.units), dtype=self.compute_dtype
        )

    def save_own_variables(self, store: Any) -> None:
        """Writes the whole kernel; all ranks call, rank 0's file stays."""
        if not self.built:
            return
        store["kernel"] = tables.to_save(self.kernel, self._collectives)
        if self.bias is not None:
            store["bias"] = self.bias

    def load_own_variables(self, store: Any) -> None:
        """Reads this rank's part of the kernel."""
        tables.load(self.kernel, store["kernel"])
        if self.bias is not None:
            self.bias.assign(store["bias"])

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets kernel and bias; the kernel whole, or this rank's part.

        Args:
            weights: anything that can be sliced, a memory map for example.
        """
        whole_tables.set_weights(self, weights)

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config: dict[str, Any] = super().get_config()
        for name in (
            "units",
            "input_dim",
            "use_bias",
            "binary_values",
            "wire_dtype",
            "wire_rounding",
            "wire_packing",
            "learn_frequent_ids",
            "prefetch_ids",
            "out_of_range",
        ):
            config[name] = getattr(self, name)
        config["sharding"] = (
            placement_to_dict(self.sharding)
            if isinstance(self.sharding, TablePlacement)
            else self.sharding
        )
        for name, module in (
            ("activation", keras.activations),
            ("kernel_initializer", keras.initializers),
            ("bias_initializer", keras.initializers),
            ("kernel_regularizer", keras.regularizers),
            ("bias_regularizer", keras.regularizers),
        ):
            config[name] = module.serialize(getattr(self, name))
        return config


def _positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value <= 0:
        raise ValueError(
            f"Argument `{name}` must be a positive integer. Received: "
            f"{name}={value!r}."
        )
    return value


def _rows(input_dim: int | None, units: int) -> int | None:
    if input_dim is None:
        return None
    if units > _positive("input_dim", input_dim):
        warnings.warn(
            f"FullSparse(units={units}, input_dim={input_dim}) has more "
            "columns than rows. Its arguments are in the order of a Dense "
            "layer, not in that of an Embedding.",
            stacklevel=3,
        )
    return input_dim
