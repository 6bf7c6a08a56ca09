# SPDX-License-Identifier: Apache-2.0
"""Several sparse layers whose ids and results travel together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext.collectives import collectives as collectives_lib
from tfdist_ext.embedding import frequent_ids
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.pooled_lookup import pooled_lookup
from tfdist_ext.layers import tables
from tfdist_ext.layers.full_sparse import FullSparse
from tfdist_ext.planner.plan import plan
from tfdist_ext.prefetch import prefetched_ids

keras = tf.keras


@keras.utils.register_keras_serializable(package="tfdist_ext")
class SharedExchange(keras.layers.Layer):  # type: ignore[name-defined]
    """Calls `FullSparse` layers on an input each, in one exchange.

    The result is that of calling each by itself. Under a strategy there is
    one exchange of ids and one of results for all of them, instead of two
    for each: less waiting, where there are many layers or small batches.
    Layers with `sharding="auto"` that are not built yet are placed by one
    plan, which may lay whole kernels on different ranks.

    >>> layer = SharedExchange([FullSparse(4, 100), FullSparse(8, 50)])
    >>> wide, deep = layer([tf.constant([[3, 4]]), tf.constant([7])])
    >>> deep.shape
    TensorShape([1, 8])

    Args:
        layers: `FullSparse` layers with `input_dim` and one way to travel
            (equal `wire_...` arguments and `learn_frequent_ids`).
        prefetch_ids: exchange ids a step ahead, see `preprocess`.

    Raises:
        ValueError: for other layers.
    """

    def __init__(
        self,
        layers: Sequence[FullSparse],
        prefetch_ids: bool = False,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("autocast", False)
        super().__init__(**kwargs)
        for layer in layers:
            if not isinstance(layer, FullSparse) or layer.input_dim is None:
                raise ValueError(
                    "Argument `layers` must be FullSparse layers with an "
                    f"`input_dim`. Received in it: {layer!r}."
                )
        wires = {_wire(layer) for layer in layers}
        if len(wires) != 1:
            raise ValueError(
                "Argument `layers` must be at least one layer, all with equal "
                "`wire_...` arguments and `learn_frequent_ids`. "
                f"Received: {sorted(wires)}."
            )
        self.layers = list(layers)
        self.prefetch_ids = prefetch_ids
        for index, layer in enumerate(layers):
            # Checkpoints find attributes; Keras 3 hides lists from them.
            setattr(self, f"layer_{index}", layer)
        self.supports_jit = False

    def build(self, input_shapes: Any) -> None:
        """Places the layers by one plan and builds them."""
        self._collectives = collectives_lib.active()
        if self.prefetch_ids:
            # Of what `preprocess` makes there is one shape.
            input_shapes = [input_shapes] * len(self.layers)
        self._require_one_each(input_shapes)
        self._place(input_shapes)
        for layer, shape in zip(self.layers, input_shapes, strict=True):
            if not layer.built:
                layer.build(shape)
        self._features = [
            dataclasses.replace(layer.feature, table=index)
            for index, layer in enumerate(self.layers)
        ]
        self._frequent = None
        if self.layers[0].learn_frequent_ids:
            self._frequent = frequent_ids.for_features(
                self._features, self._collectives, self.name
            )
        self.built = True

    def _place(self, input_shapes: Any) -> None:
        _, world_size = tables.rank_and_world_size(self._collectives)
        if world_size == 1 or any(layer.built for layer in self.layers):
            return
        features = [
            layer.describe(shape)
            for layer, shape in zip(self.layers, input_shapes, strict=True)
        ]
        made = plan([each.table for each in features], features, world_size)
        for layer in self.layers:
            layer.planned = made.placement_of(layer.name)

    def call(self, inputs: Sequence[Any]) -> list[tf.Tensor]:
        """The outputs of the layers.

        Args:
            inputs: one for each layer, see `FullSparse`.

        Returns:
            `[batch, units]` of each layer.
        """
        if tables.is_symbolic_build():
            samples = tf.shape(tf.nest.flatten(inputs)[0])[0]
            return [tf.zeros([samples, layer.units]) for layer in self.layers]
        ids, ahead = tables.prefetched(self, inputs) or (
            self._ids(inputs),
            None,
        )
        pooled = pooled_lookup(
            ids,
            self._features,
            [layer.kernel for layer in self.layers],
            self._collectives,
            dataclasses.replace(
                tables.wire_of(self.layers[0]), label=self.name
            ),
            self._frequent,
            ahead,
        )
        return [
            layer.finish(value)
            for layer, value in zip(self.layers, pooled, strict=True)
        ]

    def _ids(self, inputs: Sequence[Any]) -> list[list[Ids]]:
        self._require_one_each(inputs)
        return [
            layer.ids_of(value)
            for layer, value in zip(self.layers, inputs, strict=True)
        ]

    def preprocess(self, inputs: Sequence[Any]) -> Any:
        """Prepares inputs in the input pipeline, see `FullSparse.preprocess`.

        Args:
            inputs: one for each layer.

        Returns:
            What the layer takes as its inputs.
        """
        if self.prefetch_ids:
            return prefetched_ids.bundle(self._ids(inputs))
        return inputs

    def _require_one_each(self, inputs: Sequence[Any]) -> None:
        if len(inputs) != len(self.layers):
            raise ValueError(
                f"Layer '{self.name}' takes one input for each of its "
                f"{len(self.layers)} layers. Received: {len(inputs)}."
            )

    def compute_output_shape(self, input_shapes: Any) -> list[Any]:
        """`(batch, units)` of each layer."""
        return [
            layer.compute_output_shape(shape)
            for layer, shape in zip(self.layers, input_shapes, strict=True)
        ]

    def compute_output_spec(self, inputs: Any, **kwargs: Any) -> list[Any]:
        """The symbolic outputs (Keras 3)."""
        if self.prefetch_ids:
            inputs = [inputs] * len(self.layers)
        return [
            layer.compute_output_spec(value, **kwargs)
            for layer, value in zip(self.layers, inputs, strict=True)
        ]

    def get_config(self) -> dict[str, Any]:
        """Arguments to make the layer again."""
        config: dict[str, Any] = super().get_config()
        serialize = keras.utils.serialize_keras_object
        config["layers"] = [serialize(layer) for layer in self.layers]
        config["prefetch_ids"] = self.prefetch_ids
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SharedExchange:
        """The layer that `get_config` describes."""
        deserialize = keras.utils.deserialize_keras_object
        layers = [deserialize(layer) for layer in config["layers"]]
        return cls(**{**config, "layers": layers})


def _wire(layer: FullSparse) -> tuple[Any, ...]:
    return (
        layer.wire_dtype,
        layer.wire_rounding,
        layer.wire_packing,
        layer.learn_frequent_ids,
    )
