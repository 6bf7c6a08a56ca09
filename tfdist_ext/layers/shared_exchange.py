# SPDX-License-Identifier: Apache-2.0
"""Several sparse layers that share one exchange of ids and of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.comm import collectives as collectives_lib
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.layers import sparse_layer
from tfdist_ext.layers.full_sparse import FullSparse
from tfdist_ext.layers.sparse_layer import SparseLayer
from tfdist_ext.tables.plan import ShardingPlan
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


@keras.utils.register_keras_serializable(package="tfdist_ext")
class SharedExchange(SparseLayer):
    """Calls several `FullSparse` layers, each on its input, in one exchange.

    The results are those of separate calls. Under a strategy, all layers share
    one exchange of ids and one of results, instead of two per layer. This
    reduces waiting if there are many layers or small batches. One plan places
    layers with `sharding="auto"` that are not built yet, and may place entire
    kernels on different ranks.

    >>> layer = SharedExchange([FullSparse(4, 100), FullSparse(8, 50)])
    >>> wide, deep = layer([tf.constant([[3, 4]]), tf.constant([7])])
    >>> deep.shape
    TensorShape([1, 8])

    Args:
        layers: `FullSparse` layers that have an `input_dim` and equal
            `wire_...` arguments.
        prefetch_ids: whether ids are exchanged one step ahead, see
            `preprocess`.

    Raises:
        ValueError: if `layers` contains another layer, or wire formats differ.
    """

    def __init__(
        self,
        layers: Sequence[FullSparse],
        prefetch_ids: bool = False,
        **kwargs: Any,
    ) -> None:
        for layer in layers:
            if not isinstance(layer, FullSparse) or layer.input_dim is None:
                raise ValueError(
                    "Argument `layers` must be FullSparse layers with an "
                    f"`input_dim`. Received in it: {layer!r}."
                )
        wires = {layer.wire for layer in layers}
        if len(wires) != 1:
            received = [each.arguments() for each in wires]
            raise ValueError(
                "Argument `layers` must be at least one layer, all with equal "
                f"`wire_...` arguments. Received: {received}."
            )
        super().__init__(wire=wires.pop(), prefetch_ids=prefetch_ids, **kwargs)
        self.layers = list(layers)
        for index, layer in enumerate(layers):
            # Checkpoints find attributes. Keras 3 hides lists from checkpoints.
            setattr(self, f"layer_{index}", layer)

    def build(self, input_shapes: Sequence[Shape]) -> None:
        """Places the layers by one plan and builds them.

        Args:
            input_shapes: one shape for each layer.
        """
        self._collectives = collectives_lib.active()
        if self.prefetch_ids:
            # Keras passes one shape for the result of `preprocess`.
            input_shapes = [input_shapes] * len(self.layers)
        self._require_one_for_each(input_shapes)
        self._place(input_shapes)
        for layer, shape in zip(self.layers, input_shapes, strict=True):
            if not layer.built:
                layer.build(shape)
        self.built = True

    @property
    def _features(self) -> list[Feature]:  # type: ignore[override]
        # Computed at each use, because tables may be moved.
        return [
            dataclasses.replace(layer.feature, table=index)
            for index, layer in enumerate(self.layers)
        ]

    @property
    def plan(self) -> ShardingPlan | None:
        """The plan that all layers share; None if there is no such plan."""
        made = [layer.plan for layer in self.layers]
        return made[0] if all(each is made[0] for each in made) else None

    def _place(self, input_shapes: Sequence[Shape]) -> None:
        if self._collectives is None:
            return
        if any(layer.built for layer in self.layers):
            return
        features = [
            layer.describe(shape)
            for layer, shape in zip(self.layers, input_shapes, strict=True)
        ]
        made = sparse_layer.make_plan(features, self.wire, self._collectives)
        for layer in self.layers:
            layer.plan = made

    def call(self, inputs: Sequence[TensorLike]) -> list[tf.Tensor]:
        """Calls the layers.

        Args:
            inputs: one input for each layer, see `FullSparse`, or the result
                of `preprocess`.

        Returns:
            A list of the layers' outputs, each `[batch, units]`.
        """
        if is_symbolic_build() and self.prefetch_ids:
            samples = tf.shape(inputs)[0]
            return [tf.zeros([samples, layer.units]) for layer in self.layers]
        layouts = self._layouts(inputs)
        if is_symbolic_build():
            return [
                id_layout.zeros(each, layer.units)
                for layer, each in zip(self.layers, layouts, strict=True)
            ]
        pooled = self._look_up(inputs)
        return [
            layer.finish(value, each)
            for layer, value, each in zip(
                self.layers, pooled, layouts, strict=True
            )
        ]

    def table_variables(self) -> list[Variable]:
        """Returns this rank's part of each layer's kernel, in order."""
        return [layer.kernel for layer in self.layers]

    def _ids(self, inputs: Sequence[TensorLike]) -> list[list[Ids]]:
        self._require_one_for_each(inputs)
        return [
            layer.ids_of(value)
            for layer, value in zip(self.layers, inputs, strict=True)
        ]

    def _layouts(self, inputs: TensorLike) -> list[Layout]:
        if prefetched_ids.is_prefetched(inputs):
            return list(inputs.layouts)
        self._require_one_for_each(inputs)
        return [
            layer.layout_of(value)
            for layer, value in zip(self.layers, inputs, strict=True)
        ]

    def _require_one_for_each(self, inputs: Sequence[TensorLike]) -> None:
        if len(inputs) != len(self.layers):
            raise ValueError(
                f"Layer '{self.name}' takes one input for each of its "
                f"{len(self.layers)} layers. Received: {len(inputs)}."
            )

    def compute_output_shape(
        self, input_shapes: Sequence[Shape]
    ) -> list[tuple[int | None, ...]]:
        """Returns a list of the layers' output shapes."""
        return [
            layer.compute_output_shape(shape)
            for layer, shape in zip(self.layers, input_shapes, strict=True)
        ]

    def compute_output_spec(
        self, inputs: Sequence[TensorLike], **kwargs: Any
    ) -> list[tf.keras.KerasTensor]:
        """Returns the symbolic outputs (Keras 3)."""
        if self.prefetch_ids:
            inputs = [inputs] * len(self.layers)
        return [
            layer.compute_output_spec(value, **kwargs)
            for layer, value in zip(self.layers, inputs, strict=True)
        ]

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
        config = super().get_config()
        serialize = keras.utils.serialize_keras_object
        config["layers"] = [serialize(layer) for layer in self.layers]
        return config

    @classmethod
    def from_config(cls, config: Config) -> SharedExchange:
        """Creates the layer from its `get_config`."""
        deserialize = keras.utils.deserialize_keras_object
        layers = [deserialize(layer) for layer in config["layers"]]
        return cls(**{**config, "layers": layers})
