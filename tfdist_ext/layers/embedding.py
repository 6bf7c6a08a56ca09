# SPDX-License-Identifier: Apache-2.0
"""Keras's Embedding layer with a table that is partitioned over the ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext.embedding import id_layout
from tfdist_ext.embedding import prefetched_ids
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.embedding.feature import Wire
from tfdist_ext.embedding.id_layout import Layout
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import is_symbolic_build
from tfdist_ext.keras_internals import symbolic
from tfdist_ext.layers import sparse_inputs
from tfdist_ext.layers import sparse_layer
from tfdist_ext.layers.sparse_layer import OneTable
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import ROWS
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.tables import checks
from tfdist_ext.tables import problem
from tfdist_ext.tables import table_config
from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import SIZES
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig
from tfdist_ext.type_names import Config
from tfdist_ext.type_names import ConstraintLike
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import RegularizerLike
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras

# Regularizers whose penalty is a sum over the elements of the weight.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

# Keras's arguments that a partitioned table does not support, and what to do.
_REFUSED = {
    "lora_rank": "Train a small layer after this one instead.",
    "lora_alpha": "Train a small layer after this one instead.",
    "quantization_config": "Use dtype='bfloat16' for a smaller table.",
    "sparse": "Use ragged ids if samples have few ids.",
    "use_one_hot_matmul": "Leave it out: the layer looks rows up.",
}


@keras.utils.register_keras_serializable(package="tfdist_ext")
class Embedding(OneTable):
    """Turns ids into rows of a table, as `keras.layers.Embedding` does.

    Arguments, outputs and masks are the same as in `keras.layers.Embedding`
    of Keras 3 and of tf_keras. Under a `HybridParallelStrategy` the table is
    partitioned over the ranks. All sparse layers of a model share one
    exchange per direction and step, and one plan places their tables.

    >>> layer = Embedding(1000, 8, mask_zero=True)
    >>> layer(tf.constant([[3, 7, 0], [2, 0, 0]])).shape
    TensorShape([2, 3, 8])

    Inputs are ids in a tensor of any number of dimensions. Their dtype is an
    integer dtype, or a float dtype whose values are whole numbers. For a
    RaggedTensor, the output is a RaggedTensor. Cells of a SparseTensor
    without an id have id 0.

    One thing differs from Keras: an id out of range is an error on every
    rank. This includes negative ids, which Keras 3 counts from the end.

    Args:
        input_dim: number of rows of the table; ids are in `[0, input_dim)`.
        output_dim: number of columns of the table.
        embeddings_initializer: a Keras initializer or its name, see
            `tfdist_ext.embedding.initial_rows`.
        embeddings_regularizer: a Keras regularizer. It is applied to the rows
            that a batch looks up, once for each lookup of a row, and its
            result is added to the loss; a warning says so. With
            `sharding="data_parallel"` it is applied to the entire table, as in
            Keras.
        embeddings_constraint: a Keras constraint; allowed only with
            `sharding="data_parallel"`.
        mask_zero: whether id 0 is padding, which following layers mask.
        weights: the initial table, `[input_dim, output_dim]`, or a list that
            contains only this table.
        input_length: an argument of tf_keras's layer; has no effect in Keras 3.
        sharding: the placement of the table, see `FullSparse`.
        prefetch_ids: whether ids are exchanged one step ahead, see
            `preprocess`.
        out_of_range: "error" raises an error on every rank, "ignore" returns
            zeros.
        max_norm: the largest Euclidean norm of a row, see `TableConfig`.
        storage: the device of the table, see `TableConfig`.
        **kwargs: arguments of a Keras layer, and the arguments of the wire
            format, see `FullSparse`.

    Raises:
        ValueError: if an argument has a value that is not allowed.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: InitializerLike = "uniform",
        embeddings_regularizer: RegularizerLike = None,
        embeddings_constraint: ConstraintLike = None,
        mask_zero: bool = False,
        weights: TensorLike = None,
        *,
        input_length: int | Sequence[int | None] | None = None,
        sharding: checks.Placement | str | TablePlacement = "auto",
        prefetch_ids: bool = False,
        out_of_range: checks.OutOfRange = "error",
        **kwargs: Any,
    ) -> None:
        where = f"layer '{kwargs.get('name') or 'embedding'}'"
        for name, remedy in _REFUSED.items():
            if kwargs.pop(name, None):
                raise ValueError(
                    f"Argument `{name}` of Keras's Embedding is not supported "
                    f"({where}). {remedy}"
                )
        _take_length(input_length, kwargs)
        super().__init__(
            wire=Wire.taken_from(kwargs),
            prefetch_ids=prefetch_ids,
            sharding=sharding,
            out_of_range=out_of_range,
            **kwargs,
        )
        table_config.refuse_vocabulary("input_dim", input_dim, where)
        self.input_dim = checks.integer(
            "input_dim", input_dim, 1, where, SIZES["vocabulary_size"]
        )
        self.output_dim = checks.integer(
            "output_dim", output_dim, 1, where, SIZES["embedding_dim"]
        )
        self.embeddings_initializer = keras.initializers.get(
            embeddings_initializer
        )
        self.embeddings_regularizer = keras.regularizers.get(
            embeddings_regularizer
        )
        self.embeddings_constraint = keras.constraints.get(
            embeddings_constraint
        )
        self.mask_zero = self.supports_masking = mask_zero
        self.input_length = input_length
        self._first_table = _matrix(weights)
        if self.embeddings_constraint is not None and not self._is_whole:
            raise ValueError(
                "`embeddings_constraint` needs the whole table on every rank: "
                "use it with sharding='data_parallel'. Received: "
                f"sharding={self.sharding!r} ({where})."
            )
        checks.one_of("dtype", self._table_dtype, checks.TABLE_DTYPES, where)

    @property
    def _table_dtype(self) -> str:
        return tf.as_dtype(self.variable_dtype).name

    def build(self, input_shape: Shape = None) -> None:
        """Creates this rank's part of the table.

        Args:
            input_shape: the shape of the ids.
        """
        initializer = self.embeddings_initializer
        if self._first_table is not None:
            initializer = keras.initializers.Constant(self._first_table)
        whole = {}
        if self._is_whole:
            whole = {
                "regularizer": self.embeddings_regularizer,
                "constraint": self.embeddings_constraint,
            }
        elif self.embeddings_regularizer is not None:
            warnings.warn(
                f"Layer '{self.name}': `embeddings_regularizer` is applied to "
                "the rows that a batch looks up, each as often as it is "
                "looked up. keras.layers.Embedding applies it to the whole "
                "table in every step, so the loss and the weights differ. "
                "Use sharding='data_parallel' for that, or scale the "
                "regularizer.",
                stacklevel=2,
            )
        self.embeddings = self._add_table(
            "embeddings",
            self._place(input_shape),
            initializer,
            max_norm=self.max_norm,
            dtype=self._table_dtype,
            **whole,
        )
        self._first_table = None
        self.built = True

    def describe(self, input_shape: Shape) -> FeatureConfig:
        """Returns the layer's feature and table, for the planner."""
        table = TableConfig(
            self.name,
            self.input_dim,
            self.output_dim,
            combiner=None,
            placement=self.sharding,
            storage=self.storage,
            dtype=self._table_dtype,
        )
        inner = sparse_layer.inner_sizes(self._ids_shape(input_shape))
        hotness = sparse_layer.product(inner)
        if None in inner:
            hotness *= int(problem.USUAL_HOTNESS)
        return FeatureConfig(
            self.name,
            table,
            (None, *inner),
            (None, *inner, self.output_dim),
            hotness=max(hotness, 1),
        )

    def table_variables(self) -> list[Variable]:
        """Returns this rank's part of each table, by its `Feature.table`."""
        return [self.embeddings]

    def _own_variables(self) -> dict[str, Variable]:
        # "0" is Keras's name, so that each layer can read the other's files.
        return {"0": self.embeddings}

    def _ids_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the ids, given Keras's shape of the input."""
        if self.prefetch_ids and shape is not None:
            return tuple(shape)[:-1]
        return shape

    def call(self, inputs: TensorLike) -> TensorLike:
        """Looks up the row of every id.

        Args:
            inputs: ids, see the class, or the result of `preprocess`.

        Returns:
            The rows, `[*ids.shape, output_dim]`, in the layer's compute dtype.
        """
        if is_symbolic_build():
            if self.prefetch_ids:
                inputs = inputs[..., 0]
            (layout,) = self._layouts(inputs)
            return id_layout.zeros(layout, self.output_dim)
        (layout,) = self._layouts(inputs)
        (rows,) = self._look_up(inputs)
        rows.set_shape([None, self.output_dim])
        rows = tf.cast(rows, self.compute_dtype)
        found = id_layout.arranged(rows, layout)
        if self.embeddings_regularizer is not None and not self._is_whole:
            self.add_loss(self._penalty(inputs, found))
        return found[0] if _is_scalar(inputs) else found

    def _penalty(self, inputs: TensorLike, found: TensorLike) -> tf.Tensor:
        """Applies the regularizer to the rows that were looked up.

        All tables share one exchange, so the rows alone do not show how they
        depend on the batch. The layer's ids show it.
        """
        rows = tf.identity(getattr(found, "flat_values", found))
        ids = getattr(inputs, "flat_values", inputs)
        step = whole_batch.keras_step()
        if step is not None and tf.is_symbolic_tensor(rows):
            same = not tf.is_symbolic_tensor(ids)
            kind = SAME if same else whole_batch.kind_of(step, ids).name
            sums = isinstance(self.embeddings_regularizer, _SUMS)
            if isinstance(found, tf.RaggedTensor) and sums and kind != SAME:
                kind = ROWS  # these rows belong to this rank's samples
            if kind in (SAME, ROWS):
                marks.set_dependence(rows, kind)
        return self.embeddings_regularizer(rows)

    def _ids(self, inputs: TensorLike) -> list[list[Ids]]:
        ids = _as_array(inputs)
        return [[sparse_inputs.ids_of(ids, None, self.name, unpooled=True)]]

    def _layouts(self, inputs: TensorLike) -> list[Layout]:
        if prefetched_ids.is_prefetched(inputs):
            return list(inputs.layouts)
        return [sparse_inputs.layout_of(_as_array(inputs), True, self.name)]

    def compute_mask(
        self, inputs: TensorLike, mask: TensorLike = None
    ) -> tf.Tensor | None:
        """Returns where ids are not 0 if `mask_zero` is set, otherwise None."""
        del mask
        if not self.mask_zero:
            return None
        if prefetched_ids.is_prefetched(inputs):
            (layout,), ids = inputs.layouts, inputs.now.lists[0].values
            return id_layout.arranged(tf.not_equal(ids, 0), layout)
        if KERAS_3 and isinstance(inputs, keras.KerasTensor):
            return keras.ops.not_equal(inputs, 0)
        if isinstance(inputs, tf.SparseTensor):
            inputs = _as_array(inputs)
        return tf.not_equal(inputs, tf.zeros([], inputs.dtype))

    def compute_output_shape(
        self, input_shape: Shape
    ) -> tuple[int | None, ...]:
        """Returns `(*input_shape, output_dim)`."""
        return (*self._ids_shape(input_shape), self.output_dim)

    def compute_output_spec(
        self, inputs: TensorLike, **_: Any
    ) -> tf.keras.KerasTensor:
        """Returns the symbolic output (Keras 3)."""
        shape = self.compute_output_shape(inputs.shape)
        ragged = getattr(inputs, "ragged", False)
        return symbolic(shape, self.compute_dtype, ragged)

    def get_config(self) -> Config:
        """Returns the arguments that create this layer again."""
        config = super().get_config()
        for name in ("input_dim", "output_dim", "mask_zero", "input_length"):
            config[name] = getattr(self, name)
        for name, module in (
            ("embeddings_initializer", keras.initializers),
            ("embeddings_regularizer", keras.regularizers),
            ("embeddings_constraint", keras.constraints),
            ("activity_regularizer", keras.regularizers),
        ):
            config[name] = module.serialize(getattr(self, name))
        return config


def _take_length(input_length: Any, kwargs: Keywords) -> None:
    """Handles `input_length` as the layer of the installed Keras does."""
    if KERAS_3:
        if input_length is not None:
            warnings.warn(
                "Argument `input_length` has no effect in Keras 3.",
                stacklevel=3,
            )
    elif "input_shape" not in kwargs:
        lengths = input_length or (None,)
        if not isinstance(lengths, list | tuple):
            lengths = (lengths,)
        kwargs["input_shape"] = tuple(lengths)


def _matrix(weights: TensorLike) -> np.ndarray | None:
    """Returns the initial table, which may be the only element of a list."""
    if isinstance(weights, list | tuple) and len(weights) == 1:
        weights = weights[0]
    return None if weights is None else np.asarray(weights)


def _is_scalar(inputs: TensorLike) -> bool:
    return tf.is_tensor(inputs) and inputs.shape.rank == 0


def _as_array(inputs: TensorLike) -> TensorLike:
    """Returns ids as a RaggedTensor, or a tensor with 1 or more dimensions."""
    if isinstance(inputs, tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.reorder(inputs))
    return inputs[tf.newaxis] if _is_scalar(inputs) else inputs
