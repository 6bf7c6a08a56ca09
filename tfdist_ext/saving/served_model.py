# SPDX-License-Identifier: Apache-2.0
"""A model traced with stock ops only, with its tables and signatures."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import equal_lists
from tfdist_ext.embedding import pooled_lookup
from tfdist_ext.embedding.capture import Lookup
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.embedding.feature import Ids
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.keras_internals import value_of
from tfdist_ext.saving import delta_files
from tfdist_ext.saving import warm_up
from tfdist_ext.saving.onnx_tables import OnnxTable
from tfdist_ext.saving.served_keys import ServedKeys
from tfdist_ext.saving.served_table import MappedTable
from tfdist_ext.saving.served_table import ServedTable
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import Model
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import T
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import Variable

keras = tf.keras


def inputs_of(model: Model, given: Nest = None) -> Nest:
    """Specs of a model's inputs, for any batch size.

    Args:
        model: Keras model.
        given: a nest of specs, or of the values of a batch; None to use the
            specs that the model has.

    Raises:
        ValueError: the model has no specs of its inputs.
    """
    if given is None:
        given = _known_inputs(model)
    if given is None:
        raise ValueError(
            f"The inputs of model '{model.name}' are not known. Pass "
            "`inputs`: a batch as you give it to predict(), or a nest of "
            "tf.TensorSpec, tf.RaggedTensorSpec and tf.SparseTensorSpec."
        )
    return tf.nest.map_structure(_spec_of, _plain(given))


def _known_inputs(model: Model) -> Nest:
    if KERAS_3:
        if isinstance(model, keras.Sequential):
            return model.inputs[0] if getattr(model, "inputs", None) else None
        # Keras knows the input shapes of a subclassed model, but not the
        # dtypes.
        return model.input if hasattr(model, "output_names") else None
    spec = model.save_spec()
    if spec is None:
        return None
    (inputs, *_), _ = spec
    return inputs


def _plain(nest: Nest) -> Nest:
    """The nest without the wrappers that Keras uses for tracking."""
    if isinstance(nest, Mapping):
        return {key: _plain(value) for key, value in nest.items()}
    if isinstance(nest, list | tuple) and not _is_leaf(nest):
        return [_plain(value) for value in nest]
    return nest


def _is_leaf(value: object) -> bool:
    return isinstance(value, tf.SparseTensor)


def _spec_of(value: TensorLike | tf.TypeSpec) -> tf.TypeSpec:
    """The spec of one input of any kind, for any batch size."""
    name = getattr(value, "name", None) or None
    if isinstance(value, tf.TypeSpec):
        spec = value
    elif hasattr(value, "type_spec"):  # symbolic tensor of tf_keras
        spec = value.type_spec
    elif isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        spec, name = tf.type_spec_from_value(value), None
    elif tf.is_tensor(value) or isinstance(value, np.ndarray):
        spec = tf.TensorSpec(value.shape, value.dtype)
        name = None
    elif hasattr(value, "shape") and hasattr(value, "dtype"):
        spec = _spec_of_keras_3(value)
    else:
        spec = tf.type_spec_from_value(tf.convert_to_tensor(value))
    return _of_any_batch(spec, name)


def _spec_of_keras_3(value: tf.keras.KerasTensor) -> tf.TypeSpec:
    shape = list(value.shape)
    if getattr(value, "sparse", False):
        return tf.SparseTensorSpec(shape, value.dtype)
    if getattr(value, "ragged", False):
        rank = getattr(value, "ragged_rank", None) or len(shape) - 1
        return tf.RaggedTensorSpec(shape, value.dtype, rank)
    return tf.TensorSpec(shape, value.dtype)


def _of_any_batch(spec: tf.TypeSpec, name: str | None) -> tf.TypeSpec:
    shape = tf.TensorShape(spec.shape)
    if shape.rank:
        shape = tf.TensorShape([None, *shape[1:]])
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    return tf.TensorSpec(shape, spec.dtype, name)


def names_of_inputs(nest: Nest) -> list[str]:
    """A name for every spec: its key, its own name, or a number."""
    paths = _paths(nest)
    own = [getattr(spec, "name", None) for spec in tf.nest.flatten(nest)]
    default = "inputs" if len(paths) == 1 else "inputs_{}"
    return _names(
        [
            path
            if any(c.isalpha() for c in path)
            else name or default.format(i)
            for i, (path, name) in enumerate(zip(paths, own, strict=True))
        ]
    )


def names_of_outputs(nest: Nest) -> list[str]:
    """A name for every output: its key, or "output_0" and so on."""
    return _names(
        [
            path if any(c.isalpha() for c in path) else f"output_{i}"
            for i, path in enumerate(_paths(nest))
        ]
    )


def _names(wanted: Sequence[str]) -> list[str]:
    """Valid and unique names of a signature."""
    names = [re.sub(r"\W", "_", name) for name in wanted]
    if len(set(names)) < len(names):
        names = [f"{name}_{i}" for i, name in enumerate(names)]
    return names


def _is_nested(nest: Nest) -> bool:
    return isinstance(nest, list | tuple) and not _is_leaf(nest)


def _paths(nest: Nest) -> list[str]:
    """Paths of the leaves, in the order of `tf.nest.flatten`."""
    if isinstance(nest, Mapping):
        items = [(str(key), nest[key]) for key in sorted(nest)]
    elif _is_nested(nest):
        items = [(str(index), value) for index, value in enumerate(nest)]
    else:
        return [""]
    return [
        f"{key}_{path}".rstrip("_")
        for key, value in items
        for path in _paths(value)
    ]


def flat_specs(
    names: Sequence[str], specs: Sequence[tf.TypeSpec]
) -> dict[str, tf.TensorSpec]:
    """The dense tensors that the leaves consist of, by name."""
    flat: dict[str, tf.TensorSpec] = {}
    for name, spec in zip(names, specs, strict=True):
        if isinstance(spec, tf.RaggedTensorSpec):
            inner = spec.shape[spec.ragged_rank + 1 :]
            flat[name] = tf.TensorSpec([None, *inner], spec.dtype)
            for level in range(spec.ragged_rank):
                splits = tf.TensorSpec([None], spec.row_splits_dtype)
                flat[_splits_name(name, level)] = splits
        elif isinstance(spec, tf.SparseTensorSpec):
            rank = tf.TensorShape(spec.shape).rank
            parts = (
                tf.TensorSpec([None, rank], tf.int64),
                tf.TensorSpec([None], spec.dtype),
                tf.TensorSpec([rank], tf.int64),
            )
            flat.update(zip(_names_of_sparse(name), parts, strict=True))
        else:
            flat[name] = spec
    return {
        name: tf.TensorSpec(spec.shape, spec.dtype, name)
        for name, spec in flat.items()
    }


def _splits_name(name: str, level: int) -> str:
    return "_".join([name, "row", "splits", *([str(level)] if level else [])])


def _names_of_sparse(name: str) -> list[str]:
    return ["_".join([name, part]) for part in ("indices", "values", "shape")]


def packed(
    names: Sequence[str],
    specs: Sequence[tf.TypeSpec],
    flat: Mapping[str, tf.Tensor],
) -> list[TensorLike]:
    """The leaves, from the tensors that `flat_specs` names."""
    leaves = []
    for name, spec in zip(names, specs, strict=True):
        if isinstance(spec, tf.RaggedTensorSpec):
            splits = [
                flat[_splits_name(name, level)]
                for level in range(spec.ragged_rank)
            ]
            leaves.append(
                tf.RaggedTensor.from_nested_row_splits(flat[name], splits)
            )
        elif isinstance(spec, tf.SparseTensorSpec):
            parts = (flat[part] for part in _names_of_sparse(name))
            leaves.append(tf.SparseTensor(*parts))
        else:
            leaves.append(flat[name])
    return leaves


def flattened(
    names: Sequence[str], leaves: Sequence[TensorLike]
) -> dict[str, tf.Tensor]:
    """The tensors of leaves, by name: the inverse of `packed`."""
    flat: dict[str, tf.Tensor] = {}
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, tf.RaggedTensor):
            flat[name] = leaf.flat_values
            for level, splits in enumerate(leaf.nested_row_splits):
                flat[_splits_name(name, level)] = splits
        elif isinstance(leaf, tf.SparseTensor):
            parts = (leaf.indices, leaf.values, leaf.dense_shape)
            flat.update(zip(_names_of_sparse(name), parts, strict=True))
        else:
            flat[name] = leaf
    return flat


Table = ServedTable | MappedTable

# Prefix of the ops of the compiled library.
_OURS = "Tfdist>"


class ServedModel(tf.Module):
    """The object that is saved: a function, its state, its signatures.

    Args:
        model: Keras model.
        inputs: see `inputs_of`.
        table_dtype: dtype of the served tables.
        folder: folder of tables that are files; None for tables in variables.
        for_onnx: whether the model is converted to ONNX, and not run.

    Attributes:
        serve: the model's call in inference, on a nest of inputs.
        tables: a `Table` for every table that the call reads, by name.
        keys: keys of the tables with a dynamic vocabulary.
        texts: variables with the texts of keys, by name of the table, for the
            tables that store them.
        dense: other variables that the call reads.
        dense_values: returns the values to save in them; all ranks must call.
        resources: hash tables and other resources that the call reads.
        export_id: identifies the deltas that fit the model, "" for none.
    """

    def __init__(
        self,
        model: Model,
        inputs: Nest,
        table_dtype: str,
        folder: str | None = None,
        for_onnx: bool = False,
    ) -> None:
        super().__init__()
        self.export_id = ""
        self.delta_number: tf.Variable | None = None
        # They are not attributes, as TensorFlow would save everything in them.
        made: dict[int, Table] = {}
        make = _maker(table_dtype, folder, for_onnx)
        dynamic: dict[int, ServedKeys] = {}

        look_up = equal_lists.look_up if for_onnx else pooled_lookup.look_up

        def answer(lookup: Lookup) -> list[tf.Tensor]:
            return [
                look_up(
                    _with_rows(dynamic, lists, feature),
                    feature,
                    _table(made, lookup, feature, make).rows_of,
                )
                for lists, feature in zip(
                    lookup.ids, lookup.features, strict=True
                )
            ]

        def call(given: Nest) -> Nest:
            with _replica_of(model), pooled_lookup.answering(answer):
                return model(given, training=False)

        specs = inputs_of(model, inputs)
        self.serve = tf.function(call, input_signature=[specs])
        # A loaded object is callable, as other loaded models are.
        self.__call__ = self.serve
        traced = out_of_scopes(self.serve.get_concrete_function)
        _check_ops(model, traced.graph)
        self.tables = {table.table_name: table for table in made.values()}
        self.keys = list(dynamic.values())
        self.texts = {
            each.table_name: each.texts
            for each in self.keys
            if each.texts is not None
        }
        read = {id(outer) for outer, _ in traced.graph.captures}
        owners = list(_variables(model, traced.graph, read, made))
        self.dense = [component for _, component in owners]
        self.dense_values = lambda: [_read(owner) for owner, _ in owners]
        self.resources = [
            each
            for each in tf.train.TrackableView(model).descendants()
            if isinstance(each, tf.saved_model.experimental.TrackableResource)
            and id(each.resource_handle) in read
        ]
        self._specs = specs

    @contextlib.contextmanager
    def keys_filled(self, collectives: Collectives | None) -> Iterator[None]:
        """Fills the keys on rank 0 while the model is saved; all ranks call."""
        try:
            for keys in self.keys:
                keys.fill(collectives)
            yield
        finally:
            for keys in self.keys:
                keys.release()

    def take_deltas(self, export_id: str) -> None:
        """Adds the method that updates the model from delta files.

        Args:
            export_id: identifies the deltas that fit the model.
        """
        self.export_id = export_id
        last = tf.Variable(0, trainable=False, dtype=tf.int64)
        self.delta_number = last
        assignments = [
            *map(delta_files.assign_rows, self.tables.values()),
            *map(delta_files.assign_whole, self.dense),
            *map(delta_files.remove_keys, self.keys),
            *map(delta_files.insert_keys, self.keys),
        ]

        def apply(path: tf.Tensor) -> dict[str, tf.Tensor]:
            records = delta_files.read(path)
            header = delta_files.parse(records[0])
            checks = delta_files.check(
                header, tf.size(records, tf.int64), export_id, last.read_value()
            )
            with tf.control_dependencies(checks):
                rows = delta_files.apply(records, assignments)
            with tf.control_dependencies([rows]):
                cleaned = [keys.clean() for keys in self.keys]
            with tf.control_dependencies(cleaned):
                last.assign(header["number"])
            names = ("number", "microseconds")
            return {"rows": rows, **{name: header[name] for name in names}}

        spec = tf.TensorSpec([], tf.string, "path")
        self.apply_delta = tf.function(
            apply, input_signature=[spec], autograph=False
        )

    def requests(self, batches: Sequence[Nest]) -> list[dict[str, tf.Tensor]]:
        """The tensors of `serving_default` for batches, by name.

        Args:
            batches: inputs of the model, as for `predict`.

        Raises:
            ValueError: a batch has another structure, shape or dtype than the
                inputs of the model, or there are more than a server takes.
        """
        if len(batches) > warm_up.MOST:
            raise ValueError(
                f"`warm_up` must have at most {warm_up.MOST} batches. "
                f"Received: {len(batches)}."
            )
        return [self._request(number, x) for number, x in enumerate(batches)]

    def _request(self, number: int, batch: Nest) -> dict[str, tf.Tensor]:
        specs = tf.nest.flatten(self._specs)
        try:
            tf.nest.assert_same_structure(self._specs, batch)
            leaves = [
                value
                if isinstance(value, tf.RaggedTensor | tf.SparseTensor)
                else tf.convert_to_tensor(value, spec.dtype)
                for value, spec in zip(
                    tf.nest.flatten(batch), specs, strict=True
                )
            ]
            for leaf, spec in zip(leaves, specs, strict=True):
                if not spec.is_compatible_with(leaf):
                    raise ValueError(f"{spec} does not fit {leaf}.")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"Batch {number} of `warm_up` is no input of the model, which "
                f"takes {self._specs}. {error}"
            ) from error
        return flattened(names_of_inputs(self._specs), leaves)

    def signatures(
        self,
    ) -> dict[str, tf.types.experimental.PolymorphicFunction]:
        """The functions that servers call by name."""
        nest = self._specs
        names = names_of_inputs(nest)
        specs = tf.nest.flatten(nest)

        @tf.function
        def serving_default(**flat: tf.Tensor) -> dict[str, tf.Tensor]:
            leaves = packed(names, specs, flat)
            outputs = self.serve(tf.nest.pack_sequence_as(nest, leaves))
            leaves = tf.nest.flatten(outputs)
            return flattened(names_of_outputs(outputs), leaves)

        arguments = flat_specs(names, specs)
        traced = out_of_scopes(
            lambda: serving_default.get_concrete_function(**arguments)
        )
        found = {"serving_default": traced}
        if self.delta_number is not None:
            found["apply_delta"] = self.apply_delta
        return found


Maker = Callable[[str, ShardSpec, Variable], Table]


def _maker(table_dtype: str, folder: str | None, for_onnx: bool) -> Maker:
    """The function that makes a served table of a trained one."""

    def make(name: str, spec: ShardSpec, source: Variable) -> Table:
        if folder is None:
            return ServedTable(name, spec, table_dtype, source)
        kind = OnnxTable if for_onnx else MappedTable
        return kind(name, spec, table_dtype, source, folder)

    return make


def _with_rows(
    dynamic: dict[int, ServedKeys], lists: Sequence[Ids], feature: Feature
) -> Sequence[Ids]:
    """Lists of ids; for a dynamic vocabulary, lists of rows."""
    keys = feature.keys
    if keys is None:
        return lists
    if id(keys) not in dynamic:
        with tf.init_scope():
            known = {each.table_name for each in dynamic.values()}
            name = _new_name(feature.spec.table, known)
            dynamic[id(keys)] = ServedKeys(keys, name)
    rows_of = dynamic[id(keys)].rows_of
    return [
        dataclasses.replace(part, values=rows_of(part.values)) for part in lists
    ]


def _table(
    made: dict[int, Table],
    lookup: Lookup,
    feature: Feature,
    make: Maker,
) -> Table:
    source = value_of(lookup.tables[feature.table])
    if id(source) not in made:
        known = {table.table_name for table in made.values()}
        name = _new_name(feature.spec.table, known)
        with tf.init_scope():
            made[id(source)] = make(name, feature.spec, source)
    return made[id(source)]


def _new_name(table: str, known: set[str]) -> str:
    """The name of a table, with a number if it is already used."""
    name, number = table, 1
    while name in known:
        name, number = f"{table}_{number}", number + 1
    return name


def out_of_scopes(call: Callable[[], T]) -> T:
    """Calls outside of all strategy scopes, so variables are plain ones."""
    if not tf.distribute.has_strategy():
        return call()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _replica_of(model: Model) -> contextlib.AbstractContextManager[object]:
    """The context in which the model's variables are of one replica."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy in (None, tf.distribute.get_strategy()):
        return contextlib.nullcontext()
    # Replicas are numbered over all ranks.
    return tf.distribute.ReplicaContext(strategy, getattr(strategy, "rank", 0))


def our_ops(definition: tf.compat.v1.GraphDef) -> list[str]:
    """The ops of this package in a `GraphDef`."""
    found = internals.ops_of(definition)
    return sorted(op for op in found if op.startswith(_OURS))


def _check_ops(model: Model, graph: tf.Graph) -> None:
    found = our_ops(graph.as_graph_def())
    if found:
        raise ValueError(
            f"Model '{model.name}' cannot be exported: its call runs "
            f"{', '.join(found)}, which need this package. Only lookups of "
            "layers become stock ops. Do not exchange values between ranks in "
            "a call with training=False."
        )


def _variables(
    model: Model, graph: tf.Graph, read: set[int], made: dict[int, Table]
) -> Iterator[tuple[Variable, tf.Variable]]:
    """Variables read by a graph, without tables, with their components."""
    known = {
        id(variable.handle)
        for table in made.values()
        for variable in table.parts().values()
    }
    candidates = [
        *tf.train.TrackableView(model).descendants(),
        *sorted(graph.variables, key=lambda variable: variable.name),
    ]
    # Distributed variables come first: their components are among the
    # descendants, too.
    candidates.sort(
        key=lambda each: (
            not isinstance(value_of(each), tf.distribute.DistributedValues)
        )
    )
    for owner in map(value_of, candidates):
        for component in internals.components(owner):
            handle = id(component.handle)
            if handle in read and handle not in known:
                known.add(handle)
                yield owner, component


def _read(variable: Variable) -> tf.Tensor:
    """The value to save of a variable, a mean if the ranks differ."""
    if isinstance(variable, internals.SyncOnReadVariable):
        with variable.distribute_strategy.scope():
            return tf.convert_to_tensor(variable)
    (component, *_) = internals.components(variable)
    return component.read_value()
