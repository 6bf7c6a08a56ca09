# SPDX-License-Identifier: Apache-2.0
"""A model traced once more, of stock ops, with the tables that it reads."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.batches.ids import Ids
from tfdist_ext.collectives.collectives import Collectives
from tfdist_ext.embedding import stock_lookup
from tfdist_ext.embedding.capture import Lookup
from tfdist_ext.embedding.feature import Feature
from tfdist_ext.keras_internals import value_of
from tfdist_ext.serving import delta_files
from tfdist_ext.serving import signature
from tfdist_ext.serving.mapped_table import MappedTable
from tfdist_ext.serving.served_keys import ServedKeys
from tfdist_ext.serving.served_table import ServedTable
from tfdist_ext.tables.shard_spec import ShardSpec

Table = ServedTable | MappedTable

# Ops of the compiled library.
_OURS = "Tfdist>"


class ServedModel(tf.Module):
    """What is saved: a function, what it reads, and its signature.

    Args:
        model: of Keras.
        inputs: see `signature.inputs_of`.
        table_dtype: of the tables.
        folder: where tables are files, None to have them in variables.

    Attributes:
        serve: the model's call in inference, of a nest of inputs.
        tables: a `Table` for every table that it reads, by name.
        keys: of those whose vocabularies grow.
        texts: variables of their keys' texts, by name of the table, where
            they are kept.
        dense: other variables that it reads.
        dense_values: reads what they are to hold; all ranks must call.
        resources: hash tables and such that it reads.
        export_id: which deltas it takes, "" for none.
    """

    def __init__(
        self,
        model: Any,
        inputs: Any,
        table_dtype: str,
        folder: str | None = None,
    ) -> None:
        super().__init__()
        self.export_id = ""
        self.delta_number: tf.Variable | None = None
        # Not attributes of their own: TensorFlow would save all in them.
        made: dict[int, Table] = {}

        def make(name: str, spec: ShardSpec, source: Any) -> Table:
            if folder is None:
                return ServedTable(name, spec, table_dtype, source)
            return MappedTable(name, spec, table_dtype, source, folder)

        grown: dict[int, ServedKeys] = {}

        def answer(lookup: Lookup) -> list[tf.Tensor]:
            return [
                stock_lookup.look_up(
                    _with_rows(grown, lists, feature),
                    feature,
                    _table(made, lookup, feature, make).rows_of,
                )
                for lists, feature in zip(
                    lookup.ids, lookup.features, strict=True
                )
            ]

        def call(given: Any) -> Any:
            with _replica_of(model), stock_lookup.answering(answer):
                return model(given, training=False)

        specs = signature.inputs_of(model, inputs)
        self.serve = tf.function(call, input_signature=[specs])
        # What is loaded is called, as other models are.
        self.__call__ = self.serve
        traced = out_of_scopes(self.serve.get_concrete_function)
        _check_ops(model, traced.graph)
        self.tables = {table.table_name: table for table in made.values()}
        self.keys = list(grown.values())
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
        """Has keys, on rank 0, that are to be saved inside; all ranks call."""
        try:
            for keys in self.keys:
                keys.fill(collectives)
            yield
        finally:
            for keys in self.keys:
                keys.release()

    def take_deltas(self, export_id: str) -> None:
        """Lets the model update itself by the files of deltas.

        Args:
            export_id: which deltas are its own.
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
            told = ("number", "microseconds")
            return {"rows": rows, **{name: header[name] for name in told}}

        spec = tf.TensorSpec([], tf.string, "path")
        self.apply_delta = tf.function(
            apply, input_signature=[spec], autograph=False
        )

    def signatures(self) -> dict[str, Any]:
        """The functions that servers call by name."""
        nest = self._specs
        names = signature.names_of_inputs(nest)
        specs = tf.nest.flatten(nest)

        @tf.function
        def serving_default(**flat: tf.Tensor) -> dict[str, tf.Tensor]:
            leaves = signature.packed(names, specs, flat)
            outputs = self.serve(tf.nest.pack_sequence_as(nest, leaves))
            leaves = tf.nest.flatten(outputs)
            return signature.flattened(
                signature.names_of_outputs(outputs), leaves
            )

        arguments = signature.flat_specs(names, specs)
        traced = out_of_scopes(
            lambda: serving_default.get_concrete_function(**arguments)
        )
        found = {"serving_default": traced}
        if self.delta_number is not None:
            found["apply_delta"] = self.apply_delta
        return found


def _with_rows(
    grown: dict[int, ServedKeys], lists: Sequence[Ids], feature: Feature
) -> Sequence[Ids]:
    """Lists of ids; where a vocabulary grows, their rows."""
    keys = feature.keys
    if keys is None:
        return lists
    if id(keys) not in grown:
        with tf.init_scope():
            known = {each.table_name for each in grown.values()}
            name = _new_name(feature.spec.table, known)
            grown[id(keys)] = ServedKeys(keys, name)
    rows_of = grown[id(keys)].rows_of
    return [
        dataclasses.replace(part, values=rows_of(part.values)) for part in lists
    ]


def _table(
    made: dict[int, Table],
    lookup: Lookup,
    feature: Feature,
    make: Callable[[str, ShardSpec, Any], Table],
) -> Table:
    source = value_of(lookup.tables[feature.table])
    if id(source) not in made:
        known = {table.table_name for table in made.values()}
        name = _new_name(feature.spec.table, known)
        with tf.init_scope():
            made[id(source)] = make(name, feature.spec, source)
    return made[id(source)]


def _new_name(table: str, known: set[str]) -> str:
    """The name of a table, with a number if another one has it."""
    name, number = table, 1
    while name in known:
        name, number = f"{table}_{number}", number + 1
    return name


def out_of_scopes(call: Callable[[], Any]) -> Any:
    """Calls out of the scope of any strategy, whose variables would be its."""
    if not tf.distribute.has_strategy():
        return call()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def _replica_of(model: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which variables of the model are those of one replica."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy in (None, tf.distribute.get_strategy()):
        return contextlib.nullcontext()
    # Replicas are numbered over all ranks.
    return tf.distribute.ReplicaContext(strategy, getattr(strategy, "rank", 0))


def our_ops(definition: Any) -> list[str]:
    """The ops of this package that a `GraphDef` has."""
    found = internals.ops_of(definition)
    return sorted(op for op in found if op.startswith(_OURS))


def _check_ops(model: Any, graph: tf.Graph) -> None:
    found = our_ops(graph.as_graph_def())
    if found:
        raise ValueError(
            f"Model '{model.name}' cannot be exported: its call runs "
            f"{', '.join(found)}, which nothing but this package can. Only "
            "lookups of layers become stock ops. Take exchanges between ranks "
            "out of what the model does with training=False."
        )


def _variables(
    model: Any, graph: Any, read: set[int], made: dict[int, Table]
) -> Iterator[tuple[Any, tf.Variable]]:
    """Variables that a graph reads, tables left out, and the plain ones."""
    known = {
        id(variable.handle)
        for table in made.values()
        for variable in table.parts().values()
    }
    candidates = [
        *tf.train.TrackableView(model).descendants(),
        *sorted(graph.variables, key=lambda variable: variable.name),
    ]
    # What is distributed first: its components are among the descendants.
    candidates.sort(
        key=lambda each: (
            not isinstance(value_of(each), internals.DistributedValues)
        )
    )
    for owner in map(value_of, candidates):
        for component in internals.components(owner):
            handle = id(component.handle)
            if handle in read and handle not in known:
                known.add(handle)
                yield owner, component


def _read(variable: Any) -> tf.Tensor:
    """What a variable is saved as, the mean of those that ranks have."""
    if isinstance(variable, internals.SyncOnReadVariable):
        with variable.distribute_strategy.scope():
            return tf.convert_to_tensor(variable)
    (component, *_) = internals.components(variable)
    return component.read_value()
