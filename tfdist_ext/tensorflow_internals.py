# SPDX-License-Identifier: Apache-2.0
"""The only file that touches private TensorFlow modules.

Everything else in the package uses the public API. A test lists what is
imported here, so that the list stays short and every addition is noticed.
"""

from __future__ import annotations

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

_PACKAGE = __name__.partition(".")[0]
# The module: AutoGraph asks one function of it what to convert.
autograph_conversion = conversion
CollectiveAllReduceExtended = (
    collective_all_reduce_strategy.CollectiveAllReduceExtended
)
DistributedVariable = values.DistributedVariable
Mirrored = values.Mirrored
MirroredVariable = values.MirroredVariable
# What `tf.is_tensor` knows, and Keras takes as an input.
NativeObject = internal.NativeObject
MultiDeviceSaver = functional_saver.MultiDeviceSaver
SaveSpec = saveable_object.SaveSpec
# The module: tf.saved_model.save and tf_keras end in one function of it.
saved_model_save = save
SyncOnReadVariable = values.SyncOnReadVariable
UpdateContext = distribute_lib.UpdateContext
# Attributes of ops in a GraphDef: with what an op is to be placed, and that it
# has a gradient of its own.
COLOCATION = "_class"
OWN_GRADIENT = "_gradient_op_type"
# A function of that module: is given all ops before they are saved.
VERIFY_OPS = "_verify_ops"
# A method of mirrored variables: does what a replica assigns.
WRITE_IN_REPLICA = "_update_replica"


def calls_as_written(
    original: Callable[..., bool], function: Any, *args: Any, **kwargs: Any
) -> bool:
    """Whether AutoGraph leaves a function alone: also those of this package.

    It would convert each function that a traced one calls: seconds at the
    start of every program. `do_not_convert` would also end the conversion of
    what is the user's below such a function: of a layer's `call`, or of what
    `strategy.run` runs.
    """
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    if package == _PACKAGE and not isinstance(function, functools.partial):
        return True
    return original(function, *args, **kwargs)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`, None if never set."""
    seed = context.global_seed()
    return None if seed is None else int(seed)


def random_state() -> list[Any]:
    """The global seed, and the state that seeds of ops are drawn from."""
    rng: Any = context.context()._rng
    return [context.global_seed(), None if rng is None else rng.getstate()]


def set_random_state(state: Sequence[Any]) -> None:
    """Goes on from what `random_state` has returned, also by JSON.

    Nothing else that `tf.random.set_seed` resets is changed.
    """
    ctx: Any = context.context()
    seed, words = state
    ctx._seed = seed
    if words is not None and ctx._rng is not None:
        version, numbers, gauss = words
        ctx._rng.setstate((version, tuple(numbers), gauss))


def seeding() -> object:
    """Another object after every call of `tf.random.set_seed`."""
    return context.context()._rng


def variable_accessed(variable: Any) -> None:
    """Tells gradient tapes and functions that an op reads the variable."""
    resource_variable_ops.variable_accessed(variable)


def read_from_first(variable: Any) -> bool:
    """Lets a variable that is summed where it is read be read as it is.

    For one whose values are equal on all ranks.

    Returns:
        Whether it is such a variable.
    """
    if not isinstance(variable, SyncOnReadVariable):
        return False
    variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return True


def replace_value(variable: Any, value: tf.Tensor) -> None:
    """Gives a variable a value of another shape, which it then has.

    Graphs that have read it before would go on with the old shape.

    Args:
        variable: not distributed; eager.
        value: of its dtype, of any shape.
    """
    tf.raw_ops.AssignVariableOp(
        resource=variable.handle, value=value, validate_shape=False
    )
    variable._shape = value.shape
    # What graphs that are traced from now on take for its shape.
    data = variable.handle._handle_data
    data.shape_and_type[0].shape.CopyFrom(value.shape.as_proto())
    variable.handle._handle_data = data


def variable_dtype(handle: tf.Tensor) -> tf.DType | None:
    """The dtype of the variable of a handle; None of another resource."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    return tf.as_dtype(data.shape_and_type[0].dtype)


def container_of(holder: Any) -> Any:
    """The distributed variable that a variable, or a handle, is a part of."""
    reference = getattr(holder, "_distributed_container", None)
    return None if reference is None else reference()


def is_updating() -> bool:
    """Whether this thread is in `extended.update`, as optimizers are."""
    return distribute_lib.get_update_replica_id() is not None


def is_recording() -> bool:
    """Whether a gradient tape may be recording now."""
    return bool(record.could_possibly_record())


def is_for_xla() -> bool:
    """Whether what is traced now is in a `tf.function(jit_compile=True)`."""
    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def current_graph() -> tf.Graph | None:
    """The graph that is being traced, None if ops are run eagerly."""
    if tf.executing_eagerly():
        return None
    return tf.compat.v1.get_default_graph()


def graphs_within(outer: tf.Graph | None) -> list[tf.Graph]:
    """The graphs that are being traced inside of one, outermost first.

    Args:
        outer: the one; None for all that are being traced.
    """
    found: list[tf.Graph] = []
    graph: Any = current_graph()
    while isinstance(graph, tf.__internal__.FuncGraph) and graph is not outer:
        found.insert(0, graph)
        graph = graph.outer_graph
    return found


def captured(value: tf.Tensor) -> tf.Tensor:
    """What a graph that is being traced has captured as a placeholder.

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


def is_function(graph: Any) -> bool:
    """Whether a graph is a `tf.function`'s, not of a branch or a loop of it."""
    return type(graph) is tf.__internal__.FuncGraph


def at_every_call(
    graph: Any, name: str, like: tf.Tensor, value: Callable[[], tf.Tensor]
) -> tf.Tensor:
    """A tensor of a function that gets its value whenever that is called.

    Args:
        graph: of the function.
        name: of the value.
        like: a tensor of its dtype and shape.
        value: is asked where the function is called.
    """
    known = [like]  # asked at once for its type, in the function itself
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
    """Batch size of a batched dataset, -1 if TensorFlow cannot tell."""
    try:
        return int(data_ops.compute_batch_size(dataset))
    except IndexError:  # elements are scalars
        return -1


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether `prefetch` is the last that is done to a dataset."""
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def functions_of(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """What a dataset, and those it reads from, map, filter and so on."""
    graphs = [each.function.graph for each in dataset._functions()]
    for source in dataset._inputs():
        graphs += functions_of(source)
    return graphs


def datasets_within(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """A dataset and all that it reads from."""
    found = [dataset]
    for source in dataset._inputs():
        found += datasets_within(source)
    return found


def may_change_order(dataset: tf.data.Dataset) -> bool:
    """Whether tf.data may give a dataset's elements in the order of the clock.

    That of a parallel interleave cannot be told; it may.
    """
    if dataset.options().deterministic is False:
        return True
    return any(
        getattr(each, "_deterministic", "") == "false"
        or isinstance(each, interleave_op._ParallelInterleaveDataset)
        for each in datasets_within(dataset)
    )


def cache_files(dataset: tf.data.Dataset) -> list[str]:
    """The files that a dataset is cached in, by the names it was given."""
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


def ops_of(definition: Any) -> set[str]:
    """Types of the ops in a `GraphDef` and in the functions that it calls."""
    library = definition.library.function
    return {
        node.op
        for nodes in (definition.node, *(f.node_def for f in library))
        for node in nodes
    }


def is_mirrored(variable: Any) -> bool:
    """Whether a variable is one that a strategy mirrors."""
    return isinstance(variable, MirroredVariable)


def components(value: Any) -> list[tf.Variable]:
    """The plain variables that a variable consists of; none of another object.

    Args:
        value: of TensorFlow: a variable, one that is distributed, or anything.
    """
    if isinstance(value, tf.distribute.DistributedValues):
        return [each for each in value.values if isinstance(each, tf.Variable)]
    return [value] if isinstance(value, tf.Variable) else []


def keep_in_list(values: list[Any], keeps: Callable[[Any], bool]) -> None:
    """Takes items out of a list, also of one that TensorFlow tracks.

    Such a list compares its items, which tensors do not allow.
    """
    storage = getattr(values, "_storage", values)
    storage[:] = [value for value in storage if keeps(value)]
    if storage is not values:
        values._update_snapshot()  # type: ignore[attr-defined]


def stop_spinning() -> None:
    """Lets idle threads of TensorFlow's pools sleep at once.

    By default they look for work for a while first, at the cost of whoever
    shares the cores. Call it before the first op; TensorFlow has no public
    way to set this for eager execution.
    """
    ctx: Any = context.context()
    if ctx._config is None:
        ctx._config = tf.compat.v1.ConfigProto()
    ctx._config.experimental.disable_thread_spinning = True


def initialize_local(extended: Any, resolver: Any) -> None:
    """Initializes a stock strategy for the devices of this process.

    Stock would set up TensorFlow's collectives as well, which nobody uses
    here, and warn where TensorFlow has been used before.

    Args:
        extended: of the strategy.
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
    """Gives TensorFlow the store of keys that its own server would keep.

    `tf.distribute.experimental.PreemptionCheckpointHandler` agrees by it on
    the step at which all ranks save.

    Args:
        insert: key and value; raises AlreadyExistsError if there is one.
        wait: key and a timeout in ms, 0 for none; returns the value.
        report: code and text of an error that all ranks shall know.
    """
    ctx: Any = context.context()
    ctx.set_config_key_value = insert
    ctx.get_config_key_value = wait
    ctx.report_error_to_cluster = report


def profiled_ops(folder: str) -> list[tuple[str, int, int]]:
    """The ops that TensorFlow's profiler has recorded on this host.

    Args:
        folder: that it was given.

    Returns:
        The type of the op, when it began and when it ended, in nanoseconds of
        the time of day. An op that goes on by itself ends with its start.
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
                    # "node:Type#...", of an op.
                    name = names[event.metadata_id].split("#")[0]
                    _, colon, op = name.rpartition(":")
                    if not colon or "::" in name or " " in op:
                        continue
                    start = line.timestamp_ns + event.offset_ps // 1000
                    end = start + event.duration_ps // 1000
                    found.append((op, start, end))
    return found
