# SPDX-License-Identifier: Apache-2.0
"""Private TensorFlow modules; no other file of the package imports them.

A test lists the imports of this file, so that the list stays short and every
addition is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl import conversion
from tensorflow.python.checkpoint import functional_saver
from tensorflow.python.data.experimental.ops import distribute as data_ops
from tensorflow.python.data.ops import cache_op
from tensorflow.python.data.ops import interleave_op
from tensorflow.python.data.ops import prefetch_op
from tensorflow.python.distribute import collective_all_reduce_strategy
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import values
from tensorflow.python.eager import context
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save
from tensorflow.python.training.saving import saveable_object
from tensorflow.python.types import internal

from tfdist_ext.type_names import ClusterResolver
from tfdist_ext.type_names import Gradient
from tfdist_ext.type_names import T
from tfdist_ext.type_names import Variable

# Bytes that are read of a TFRecord file at a time.
_RECORD_BUFFER = 1 << 20

_PACKAGE = __name__.partition(".")[0]
# The module whose function decides what AutoGraph converts.
autograph_conversion = conversion
CollectiveAllReduceExtended = (
    collective_all_reduce_strategy.CollectiveAllReduceExtended
)
DistributedVariable = values.DistributedVariable
Mirrored = values.Mirrored
MirroredVariable = values.MirroredVariable
# A type that `tf.is_tensor` accepts, and that Keras accepts as an input.
NativeObject = internal.NativeObject
MultiDeviceSaver = functional_saver.MultiDeviceSaver
SaveSpec = saveable_object.SaveSpec
# The module of a function that tf.saved_model.save and tf_keras call.
saved_model_save = save
SyncOnReadVariable = values.SyncOnReadVariable
UpdateContext = distribute_lib.UpdateContext
# Attributes of ops in a GraphDef: the ops to colocate an op with, and the
# custom gradient of an op.
COLOCATION = "_class"
OWN_GRADIENT = "_gradient_op_type"
# Function of `saved_model_save` that checks all ops before they are saved.
VERIFY_OPS = "_verify_ops"
# Method of mirrored variables that executes an assignment of a replica.
WRITE_IN_REPLICA = "_update_replica"


def calls_as_written(
    original: Callable[..., bool], function: object, *args: Any, **kwargs: Any
) -> bool:
    """Whether AutoGraph does not convert a function, as those of this package.

    AutoGraph would convert each function that a traced one calls, which takes
    seconds at the start of every program. `do_not_convert` would also prevent
    the conversion of user code that such a function calls, such as a layer's
    `call` or the function of `strategy.run`.
    """
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    if package == _PACKAGE and not isinstance(function, functools.partial):
        return True
    return original(function, *args, **kwargs)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None if it was never set."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


def random_state() -> list[object]:
    """The global seed, and the state that seeds of ops are drawn from."""
    rng: Any = context.context()._rng
    return [context.global_seed(), None if rng is None else rng.getstate()]


def set_random_state(state: Sequence[Any]) -> None:
    """Restores a state that `random_state` returned, possibly as JSON.

    Nothing else that `tf.random.set_seed` resets is changed.
    """
    ctx: Any = context.context()
    seed, words = state
    ctx._seed = seed
    if words is not None and ctx._rng is not None:
        version, numbers, gauss = words
        ctx._rng.setstate((version, tuple(numbers), gauss))


def seeding() -> object:
    """An object that is replaced at every call of `tf.random.set_seed`."""
    return context.context()._rng


def variable_accessed(variable: Variable) -> None:
    """Tells gradient tapes and functions that an op reads the variable."""
    resource_variable_ops.variable_accessed(variable)


def not_recording() -> contextlib.AbstractContextManager[None]:
    """A context whose ops no gradient tape sees."""
    stopped: contextlib.AbstractContextManager[None] = record.stop_recording()
    return stopped


def record_gradient(
    results: Sequence[tf.Tensor],
    variables: Sequence[tf.Variable],
    gradient: Callable[..., list[Gradient]],
) -> None:
    """Tells gradient tapes how tensors depend on variables.

    Args:
        results: tensors that were computed in `not_recording`.
        variables: variables that they were computed from.
        gradient: function of the gradients of the results that returns one
            gradient for each variable, as a tensor or IndexedSlices.
    """
    for variable in variables:
        variable_accessed(variable)
    record.record_operation(
        "Tfdist>Gradient",
        list(results),
        [variable.handle for variable in variables],
        gradient,
    )


def read_from_first(variable: Variable) -> bool:
    """Makes reads of an on-read variable return this rank's value.

    Such a variable is otherwise summed over the ranks. The values must be
    equal on all ranks.

    Returns:
        Whether it is an on-read variable.
    """
    if not isinstance(variable, SyncOnReadVariable):
        return False
    variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return True


def set_default_saveable_name(variable: Any) -> None:
    """Sets the attribute that a checkpoint reads of every object.

    An on-read variable reads its value to find an unknown attribute, which is
    an exchange if it is summed over the ranks.
    """
    variable._LEGACY_SAVEABLE_NAME = None


def replace_value(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns a value of another shape, and changes the variable's shape.

    Graphs that have read the variable before would use the old shape.

    Args:
        variable: eager variable that is not distributed.
        value: value of the variable's dtype, of any shape.
    """
    tf.raw_ops.AssignVariableOp(
        resource=variable.handle, value=value, validate_shape=False
    )
    variable._shape = value.shape
    # Graphs that are traced later take the shape from here.
    data = variable.handle._handle_data
    data.shape_and_type[0].shape.CopyFrom(value.shape.as_proto())
    variable.handle._handle_data = data


def variable_dtype(handle: tf.Tensor) -> tf.DType | None:
    """Dtype of the variable of a handle; None for another resource."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def container_of(holder: Variable | tf.Tensor) -> Variable | None:
    """The distributed variable that contains a variable, or a handle's."""
    reference = getattr(holder, "_distributed_container", None)
    return None if reference is None else reference()


def is_updating() -> bool:
    """Whether this thread runs `extended.update`, as optimizers do."""
    return distribute_lib.get_update_replica_id() is not None


def is_recording() -> bool:
    """Whether a gradient tape may be recording now."""
    return bool(record.could_possibly_record())


def is_for_xla() -> bool:
    """Whether the current graph is in a `tf.function(jit_compile=True)`."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def current_graph() -> tf.Graph | None:
    """The graph that is being traced; None if ops are run eagerly."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def writes_of(variable: tf.Variable) -> int:
    """Number of ops of the graph being traced that may write a variable.

    Args:
        variable: a plain variable that the graph uses.
    """
    graph: Any = current_graph()
    handle = graph.capture(variable.handle)
    return sum(op.type != "ReadVariableOp" for op in handle.consumers())


def graphs_within(outer: tf.Graph | None) -> list[tf.Graph]:
    """Graphs that are being traced inside of another one, outermost first.

    Args:
        outer: the other graph; None for all that are being traced.
    """
    found: list[tf.Graph] = []
    graph: Any = current_graph()
    while isinstance(graph, tf.__internal__.FuncGraph) and graph is not outer:
        found.insert(0, graph)
        graph = graph.outer_graph
    return found


def captured(value: tf.Tensor) -> tf.Tensor:
    """The tensor that graphs being traced have captured as a placeholder.

    Args:
        value: a symbolic tensor.

    Returns:
        The tensor outside of all graphs that capture it, or the outermost
        symbolic one; `value` if it is not captured.
    """
    while tf.is_symbolic_tensor(value) and isinstance(
        value.graph, tf.__internal__.FuncGraph
    ):
        pairs = value.graph.captures
        outer = next((out for out, inner in pairs if inner is value), None)
        if outer is None:
            break
        value = outer
    return value


def is_function(graph: tf.Graph) -> bool:
    """Whether a graph is that of a `tf.function`, not of its branch or loop."""
    return type(graph) is tf.__internal__.FuncGraph


def at_every_call(
    graph: tf.Graph, name: str, like: tf.Tensor, value: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """A tensor of a function whose value is computed at every call.

    Args:
        graph: graph of the function.
        name: name of the value.
        like: a tensor with the dtype and shape of the value.
        value: computes the value, in the caller of the function.
    """
    known = [like]  # The first call is for the type, inside of the function.
    found: tf.Tensor = graph._experimental_capture_side_input_by_ref(
        name, lambda: known.pop() if known else value()
    )
    return found


def shard_by_file(
    dataset: tf.data.Dataset, world_size: int, rank: int
) -> tf.data.Dataset:
    """The dataset that reads every `world_size`-th input file only."""
    return data_ops._AutoShardDataset(dataset, world_size, rank)


def batch_size_of(dataset: tf.data.Dataset) -> int:
    """Batch size of a batched dataset; -1 if TensorFlow cannot infer it."""
    try:
        return int(data_ops.compute_batch_size(dataset))
    except IndexError:  # The elements are scalars.
        return -1


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether `prefetch` is the last transformation of a dataset."""
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def functions_of(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Graphs of the functions of a dataset and of its inputs."""
    graphs = [each.function.graph for each in dataset._functions()]
    for source in dataset._inputs():
        graphs += functions_of(source)
    return graphs


def datasets_within(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """A dataset and all of its inputs."""
    found = [dataset]
    for source in dataset._inputs():
        found += datasets_within(source)
    return found


def tf_records_from(path: str, offset: int) -> tf.data.Dataset:
    """The records of a TFRecord file from an offset on.

    Args:
        path: path of the file.
        offset: byte at which a record begins.
    """
    records = tf.raw_ops.TFRecordDatasetV2(
        filenames=[path],
        compression_type="",
        buffer_size=_RECORD_BUFFER,
        byte_offsets=[offset],
    )
    return tf.data.experimental.from_variant(
        records, tf.TensorSpec([], tf.string)
    )


def may_change_order(dataset: tf.data.Dataset) -> bool:
    """Whether the order of a dataset's elements may depend on timing.

    The order of a parallel interleave is unknown, so it may.
    """
    if dataset.options().deterministic is False:
        return True
    return any(
        getattr(each, "_deterministic", "") == "false"
        or isinstance(each, interleave_op._ParallelInterleaveDataset)
        for each in datasets_within(dataset)
    )


def cache_files(dataset: tf.data.Dataset) -> list[str]:
    """Files that a dataset is cached in, by the names passed to `cache`."""
    names = [
        each._filename.numpy().decode()
        for each in datasets_within(dataset)
        if isinstance(each, cache_op.CacheDataset)
    ]
    return [name for name in names if name]


def op_types(dataset: tf.data.Dataset) -> set[str]:
    """Types of the ops in the functions of a dataset and of its inputs."""
    graphs = functions_of(dataset)
    return set().union(*(ops_of(each.as_graph_def()) for each in graphs))


def ops_of(definition: tf.compat.v1.GraphDef) -> set[str]:
    """Types of the ops in a `GraphDef` and in the functions that it calls."""
    library = definition.library.function
    return {
        node.op
        for nodes in (definition.node, *(f.node_def for f in library))
        for node in nodes
    }


def is_mirrored(variable: Variable) -> bool:
    """Whether a variable is mirrored by a strategy."""
    return isinstance(variable, MirroredVariable)


def components(value: object) -> list[tf.Variable]:
    """Plain variables that a variable consists of; none for other objects.

    Args:
        value: a variable of TensorFlow, a distributed one, or any object.
    """
    if isinstance(value, tf.distribute.DistributedValues):
        return [each for each in value.values if isinstance(each, tf.Variable)]
    return [value] if isinstance(value, tf.Variable) else []


def keep_in_list(values: list[T], keeps: Callable[[T], bool]) -> None:
    """Removes items from a list, also from one that TensorFlow tracks.

    A tracked list compares its items when one is removed, which tensors do
    not support.
    """
    storage = getattr(values, "_storage", values)
    storage[:] = [value for value in storage if keeps(value)]
    if storage is not values:
        values._update_snapshot()  # type: ignore[attr-defined]


def stop_spinning() -> None:
    """Lets idle threads of TensorFlow's pools sleep at once.

    By default they poll for work for a while first, which slows other
    processes on the same cores. Must be called before the first op.
    TensorFlow has no public option of this for eager execution.
    """
    ctx: Any = context.context()
    if ctx._config is None:
        ctx._config = tf.compat.v1.ConfigProto()
    ctx._config.experimental.disable_thread_spinning = True


def initialize_local(
    extended: tf.distribute.StrategyExtended, resolver: ClusterResolver | None
) -> None:
    """Initializes a stock strategy for the devices of this process.

    The stock method would also set up TensorFlow's collectives, which are not
    used here, and would warn if TensorFlow has been used before.

    Args:
        extended: extended object of the strategy.
        resolver: the cluster resolver.
    """
    ctx: Any = context.context()
    ctx.configure_collective_ops = lambda **_: None
    try:
        extended._initialize_local(resolver)
    finally:
        del ctx.configure_collective_ops


def serve_keys(
    insert: Callable[[str, str], None],
    wait: Callable[..., str],
    report: Callable[[int, str], None],
) -> None:
    """Replaces the key-value store of TensorFlow's server.

    `tf.distribute.experimental.PreemptionCheckpointHandler` uses it to agree
    on the step at which all ranks save.

    Args:
        insert: function of a key and a value; raises AlreadyExistsError if
            the key exists.
        wait: function of a key and a timeout in ms (0: no timeout); returns
            the value.
        report: function of the code and the message of an error that is
            reported to all ranks.
    """
    ctx: Any = context.context()
    ctx.set_config_key_value = insert
    ctx.get_config_key_value = wait
    ctx.report_error_to_cluster = report


def run_if(condition: tf.Tensor, function: Callable[[], object]) -> None:
    """Runs a function in a branch, as Keras's loss scale optimizers do.

    An update calls all replicas, which a branch inside of one replica cannot
    do. The branch is therefore in the cross-replica context.

    Args:
        condition: bool scalar, equal on all replicas.
        function: updates variables in a replica context.
    """

    def run() -> bool:
        function()
        return True

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(condition, run, lambda: True)
        return

    def across(strategy: tf.distribute.Strategy) -> None:
        def run_everywhere() -> bool:
            strategy.extended.call_for_each_replica(function)
            return True

        tf.cond(condition, run_everywhere, lambda: True)

    tf.distribute.get_replica_context().merge_call(across)


def profiled_ops(folder: str) -> list[tuple[str, int, int]]:
    """Ops that TensorFlow's profiler has recorded on this host.

    Args:
        folder: directory passed to the profiler.

    Returns:
        Type of each op, with its begin and its end in nanoseconds since the
        epoch. An asynchronous op ends when its start has returned.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    found = []
    for path in pathlib.Path(folder).rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        for plane in space.planes:
            if not plane.name.startswith("/host"):
                continue
            names = {i: each.name for i, each in plane.event_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    # Events of ops have names such as "node:Type#...".
                    name = names[event.metadata_id].split("#")[0]
                    _, colon, op = name.rpartition(":")
                    if not colon or "::" in name or " " in op:
                        continue
                    start = line.timestamp_ns + event.offset_ps // 1000
                    end = start + event.duration_ps // 1000
                    found.append((op, start, end))
    return found
