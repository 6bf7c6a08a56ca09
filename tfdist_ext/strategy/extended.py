# SPDX-License-Identifier: Apache-2.0
"""Implementation of the strategy behind `tf.distribute.Strategy`'s methods."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls as step_lib
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding.owner_rows import is_at_owners
from tfdist_ext.numbers import whole_batch
from tfdist_ext.numbers.kinds import SAME
from tfdist_ext.numbers.kinds import SHARD
from tfdist_ext.numbers.kinds import follows_from_constants
from tfdist_ext.ops.lookup_ops import mark_unique_rows
from tfdist_ext.optimizers import supported
from tfdist_ext.strategy import gradients
from tfdist_ext.strategy import input as input_lib
from tfdist_ext.strategy import metric_sums
from tfdist_ext.strategy.balance import Balance
from tfdist_ext.strategy.bucket_sums import BucketSums
from tfdist_ext.strategy.cluster import Cluster
from tfdist_ext.strategy.gradients import ErrorFeedback
from tfdist_ext.strategy.rounds import Rounds
from tfdist_ext.type_names import ClusterResolver
from tfdist_ext.type_names import Destinations
from tfdist_ext.type_names import InputOptions
from tfdist_ext.type_names import Keywords
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import ReduceOp
from tfdist_ext.type_names import ReduceOptions
from tfdist_ext.type_names import TensorLike
from tfdist_ext.type_names import TensorOrSlices
from tfdist_ext.type_names import Variable


class HybridParallelExtended(internals.CollectiveAllReduceExtended):
    """Adds shards, and collectives through the process group.

    Args:
        container_strategy: strategy that owns this object.
        cluster_resolver: resolver of the strategy.
        cluster: the ranks that the resolver returns, validated.
        collectives: collectives of the ranks; None in a single process.
    """

    # The process group detects a dead peer at once.
    _enable_check_health = False

    def __init__(
        self,
        container_strategy: tf.distribute.Strategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
        cluster: Cluster,
        collectives: Collectives | None,
    ) -> None:
        self.collectives = collectives
        self.error_feedback: ErrorFeedback | None = None
        self.rounds: Rounds | None = None  # None for `BSP`
        self._applies_sums = False
        self.sparse_sums: BucketSums | None = None
        self.balance = Balance("equal", max(1, len(cluster.addresses)))
        self._cluster = cluster
        super().__init__(
            container_strategy,
            cluster_resolver=cluster_resolver,
            communication_options=(
                tf.distribute.experimental.CommunicationOptions()
            ),
        )

    def _initialize_strategy(
        self,
        cluster_resolver: ClusterResolver | None,
        devices: Sequence[str] | None,
    ) -> None:
        # The stock method starts TensorFlow's server for several ranks.
        internals.initialize_local(self, cluster_resolver)
        if not self._cluster.jobs:
            return
        self._local_or_standalone_client_mode = False
        self._cluster_spec = tf.train.ClusterSpec(dict(self._cluster.jobs))
        self._task_type = self._cluster.job
        self._task_id = self._cluster.index
        self._id_in_cluster = self._cluster.rank
        self._num_workers = len(self._cluster.addresses)
        self._is_chief = self._cluster.rank == 0

    def _initialize_local_devices(
        self, cluster_resolver: ClusterResolver | None, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # One replica per process: each GPU needs a rank of its own.
        devices, kind = super()._initialize_local_devices(
            cluster_resolver, worker_device
        )
        return devices[:1], kind

    def _experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: InputOptions
    ) -> tf.distribute.DistributedDataset:
        # Called in a single process only; with several ranks the strategy
        # overrides the public method.
        followed = input_lib.followed(dataset)
        if followed is not None:
            return followed
        if self._needs_no_copy(options) or input_lib.has_optional(dataset):
            return input_lib.read_ahead(dataset)
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: InputOptions,
    ) -> tf.distribute.DistributedDataset:
        if self._needs_no_copy(options):
            return input_lib.read_ahead(dataset_fn(self._make_input_context()))
        return super()._distribute_datasets_from_function(dataset_fn, options)

    def _needs_no_copy(self, options: InputOptions) -> bool:
        """Whether no batch is copied to a device."""
        return options is None and "CPU" in self.worker_devices[0]

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        owner: Any = kwargs.get("colocate_with")
        spec = sharded_variable.spec_for(owner)
        if sharded_variable.is_shard(owner):  # The new variable is a slot.
            marks.fix(owner)
        unsynchronized = (
            kwargs.get("synchronization") == tf.VariableSynchronization.NONE
        )
        local = spec is not None or unsynchronized
        on_host = (unsynchronized and owner is None) or (
            sharded_variable.storage_for(owner) == "host"
        )
        creator = self._on_host(next_creator) if on_host else next_creator
        if not (local and (unsynchronized or self.collectives)):
            variable = super()._create_variable(creator, **kwargs)
            if isinstance(variable, internals.SyncOnReadVariable):
                internals.set_default_saveable_name(variable)
                for component in internals.components(variable):
                    marks.set_per_rank(component.handle)
            return variable
        for name in ("colocate_with", "use_resource", "distribute_strategy"):
            kwargs.pop(name, None)
        kwargs["synchronization"] = tf.VariableSynchronization.NONE
        kwargs["aggregation"] = tf.VariableAggregation.NONE
        # A slot may be initialized with values of the table.
        with (
            tf.device(self.worker_devices[0]),
            sharded_variable.reads_allowed(),
        ):
            variable = creator(**kwargs)
        if spec is not None and self.collectives is not None:
            sharded_variable.mark(variable, spec, self.collectives)
        return variable

    def _on_host(
        self, next_creator: Callable[..., tf.Variable]
    ) -> Callable[..., tf.Variable]:
        """Creates variables in host memory, also on ranks with a GPU."""
        device = tf.DeviceSpec.from_string(self.worker_devices[0])
        device = device.replace(device_type="CPU", device_index=0)

        def create(**kwargs: Any) -> tf.Variable:
            with tf.device(device):
                return next_creator(**kwargs)

        return create

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Variable, **kwargs: Any
    ) -> Callable[[], tf.Tensor]:
        if self.collectives is None or replica_id != 0:
            return super()._get_variable_creator_initial_value(
                replica_id, device, primary_var, **kwargs
            )
        collectives = self.collectives

        def broadcast_initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            return collectives.initial_value(value, str(kwargs.get("name")))

        return broadcast_initial_value

    def variable_created_in_scope(self, v: Variable) -> bool:
        return sharded_variable.is_shard(
            v
        ) or super().variable_created_in_scope(v)

    @contextlib.contextmanager
    def colocate_vars_with(
        self, colocate_with_variable: Variable
    ) -> Iterator[None]:
        # An optimizer may be built outside of the scope to restore it. Its
        # variables then determine the strategy.
        scope = contextlib.nullcontext()
        if not tf.distribute.has_strategy():
            scope = self._container_strategy().scope()
        with scope, super().colocate_vars_with(colocate_with_variable):
            yield

    def _validate_colocate_with_variable(self, variable: Variable) -> None:
        if sharded_variable.is_shard(variable):
            return
        self._check_created_here(variable)
        super()._validate_colocate_with_variable(variable)

    def _check_created_here(self, variable: Variable) -> None:
        # The stock error shows the values, or an assertion, and no remedy.
        if not self.variable_created_in_scope(variable):
            raise ValueError(
                f"Variable {variable.name!r} {variable.shape} was created "
                "outside of strategy.scope(). A layer creates its variables "
                "when it is built or first called: build or call it inside of "
                "`with strategy.scope():`."
            )

    def _replica_ctx_update(
        self,
        var: Variable,
        fn: Callable[..., Nest],
        args: Sequence[Nest] = (),
        kwargs: Keywords | None = None,
        group: bool = True,
    ) -> Nest:
        # The stock method calls `fn` in another thread, for replicas on other
        # devices. It fails inside of a condition, which
        # `ema_overwrite_frequency` creates.
        return self._update(var, fn, args, kwargs or {}, group)

    def _update(
        self,
        var: tf.Variable,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: Keywords,
        group: bool,
    ) -> Nest:
        self._check_created_here(var)
        supported.check_update(var, args)
        if self.collectives is not None and self.collectives.trial is not None:
            self.collectives.trial.note(var, args)
        with self._after_checks():
            if not sharded_variable.is_shard(var):
                return super()._update(var, fn, args, kwargs, group)
            with tf.device(var.device), internals.UpdateContext(0):
                result = fn(var, *args, **kwargs)
        return tf.group(result) if group else result

    @contextlib.contextmanager
    def _after_checks(self) -> Iterator[None]:
        # An invalid id fails the step on every rank. Variables may be written
        # only after all ids of the step have been checked.
        current = self.collectives.step if self.collectives else None
        checks = current.checks_here() if current else None
        with tf.control_dependencies(checks):
            yield

    def _reduce_to(
        self,
        reduce_op: ReduceOp,
        value: TensorLike,
        destinations: Destinations,
        options: ReduceOptions,
    ) -> TensorOrSlices:
        if self.collectives is None:
            return super()._reduce_to(reduce_op, value, destinations, options)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, internals.Mirrored) and mean:
            return value
        current = self.collectives.step
        if current is not None and current.asynchronous:
            return local_value(value)  # a metric of tf_keras, by itself
        if whole_batch.keras_step() is not None:
            assert current is not None
            total = metric_sums.total(current, self.collectives, value)
            if total is not None:
                return total
        return self._reduce_flat(mean, [local_value(value)], "reduce")[0]

    def _batch_reduce_to(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[TensorLike, Destinations]],
        options: ReduceOptions,
    ) -> list[TensorOrSlices]:
        if self.collectives is None:
            return super()._batch_reduce_to(
                reduce_op, value_destination_pairs, options
            )
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        values = [local_value(value) for value, _ in value_destination_pairs]
        return self._reduce_flat(mean, values, "gradients")

    def _replica_ctx_all_reduce(
        self, reduce_op: ReduceOp, value: Nest, options: ReduceOptions = None
    ) -> Nest:
        if self._applies_sums or self._is_on_whole_batch():
            return value
        if self.collectives is None:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        flat = tf.nest.flatten(value)
        reduced = self._reduce_flat(mean, flat, "gradients")
        return tf.nest.pack_sequence_as(value, reduced)

    @contextlib.contextmanager
    def applying_sums(self) -> Iterator[None]:
        """Optimizers in the context are given sums over the ranks."""
        outer, self._applies_sums = self._applies_sums, True
        try:
            yield
        finally:
            self._applies_sums = outer

    def reduce_gradients(
        self, values: list[TensorOrSlices]
    ) -> list[TensorOrSlices]:
        """Gradients of the global batch from those of the ranks.

        Called in steps of Keras's loops.

        Args:
            values: gradients of this rank, tensors or IndexedSlices, to be
                averaged over the ranks by samples. Gradients of shards are
                complete already and stay as they are.

        Returns:
            Tensors or IndexedSlices, equal on all ranks except for shards. An
            optimizer does not reduce them again.
        """
        collectives = self.collectives
        assert collectives is not None and collectives.step is not None
        self._mark_rows(values)
        if self.rounds is not None and self.rounds.defer:
            return self._sum_rows_of_shards(values)

        def reduce(
            parts: list[TensorOrSlices], unweighted: int = 0
        ) -> list[TensorOrSlices]:
            return self.sum_gradients(parts, True, unweighted)

        if internals.is_recording():
            result = gradients.differentiable(reduce, values, collectives)
        elif self._sends_as_is(values):
            result = metric_sums.sum_with(collectives.step, reduce, values)
        else:
            result = reduce(values)
        for value, own in zip(result, values, strict=True):
            if marks.gradient_spec(value) is None:
                marks.set_reduced(getattr(value, "values", value))
                marks.set_own_part(getattr(value, "values", value), own)
            else:
                marks.set_dependence(value.values, SHARD)
        return result

    def sum_gradients(
        self,
        values: list[TensorOrSlices],
        weighted: bool = False,
        unweighted: int = 0,
    ) -> list[TensorOrSlices]:
        """Sums gradients over the ranks; see `gradients.reduce_values`."""
        assert self.collectives is not None
        self._mark_rows(values)
        return gradients.reduce_values(
            *(self.collectives, values, "gradients", weighted),
            self.collectives.gradient_dtype,
            self._sums(of_optimizer=True),
            unweighted,
        )

    def _sends_as_is(self, values: list[TensorOrSlices]) -> bool:
        """Whether a gradient is summed by an all-reduce of float32."""
        assert self.collectives is not None
        return (
            self.collectives.gradient_dtype == tf.float32
            and self._sums(of_optimizer=True) is None
            and any(
                not isinstance(value, tf.IndexedSlices)
                and value.dtype == tf.float32
                for value in values
            )
        )

    def _mark_rows(self, values: list[TensorOrSlices]) -> None:
        """Marks gradients whose equal rows the step's optimizer sums."""
        assert self.collectives is not None
        step = self.collectives.step
        if step is not None and step.merges_rows:
            for value in values:
                if isinstance(value, tf.IndexedSlices):
                    mark_unique_rows(value)

    def sum_deferred(
        self, values: list[TensorOrSlices]
    ) -> list[TensorOrSlices]:
        """Sums gradients of this rank, which no optimizer sums again.

        Args:
            values: parts of a sum over the ranks; those of shards are
                complete already.
        """
        result = self.sum_gradients(values)
        for value in result:
            if marks.gradient_spec(value) is None:
                marks.set_reduced(getattr(value, "values", value))
            else:
                marks.set_dependence(value.values, SHARD)
        return result

    def _sum_rows_of_shards(
        self, values: list[TensorOrSlices]
    ) -> list[TensorOrSlices]:
        """Gradients of which only those of shards are of all ranks."""
        result = list(values)
        for i, value in enumerate(values):
            if marks.gradient_spec(value) is not None:
                (result[i],) = self.sum_gradients([value])
                marks.set_dependence(result[i].values, SHARD)
                if is_at_owners(value.values):
                    marks.set_at_owners(result[i].values)
        return result

    def _sums(self, of_optimizer: bool) -> BucketSums | None:
        """What sums dense float32 gradients, if not an all-reduce.

        Args:
            of_optimizer: whether an optimizer applies the sums. Others may be
                numbers that a custom loop reads, which are sent completely.
        """
        assert self.collectives is not None
        # A check compares exact sums.
        if of_optimizer and self.sparse_sums and self.collectives.trial is None:
            return self.sparse_sums
        return self.error_feedback

    def _is_whole(self, value: TensorOrSlices) -> bool:
        """Whether a value of a Keras step is that of the global batch."""
        current = whole_batch.keras_step()
        if current is None:
            return False
        if marks.gradient_spec(value) is not None:
            return False
        value = getattr(value, "values", value)
        if marks.is_reduced(value):
            return True
        if not tf.is_symbolic_tensor(value):
            return False
        kind = whole_batch.kind_of(current, value)
        if kind.name == SHARD:
            whole_batch.warn_of_shard(value)
        return kind.name == SAME and not follows_from_constants(value)

    def _reduce_flat(
        self, mean: bool, values: list[TensorOrSlices], label: str
    ) -> list[TensorOrSlices]:
        """Reduces values over the ranks, except those of the global batch."""
        result = list(values)
        local = self.rounds is not None and self.rounds.local
        if local or self._applies_sums:
            return result
        parts = [i for i, v in enumerate(values) if not self._is_whole(v)]
        reduced = self._reduce_parts(mean, [values[i] for i in parts], label)
        for i, value in zip(parts, reduced, strict=True):
            result[i] = value
        return result

    def _reduce_parts(
        self, mean: bool, values: list[TensorOrSlices], label: str
    ) -> list[TensorOrSlices]:
        collectives = self.collectives
        assert collectives is not None
        current = collectives.step
        if current is not None and current.checking:
            return [_of_one_process(value) for value in values]
        backward = current is not None and current.backward
        gradients_only = (
            label == "gradients"
            and not backward
            and step_lib.is_gradient_reduction(current)
        )
        of_optimizer = current is not None and current.optimizes
        # Means are weighted by samples, so that a rank without samples does
        # not count: its batch normalization has averaged zero values. In
        # Keras's loops gradients are means as well, even if Keras asks for
        # their sum. Sums that are read, such as those of metrics, are not
        # weighted.
        weighted = (
            current is not None
            and current.weighted
            and (mean or backward or _may_be_gradients(values, gradients_only))
        )
        if backward:  # Gradients by exchanged tensors, never by a table.
            values = [tf.convert_to_tensor(value) for value in values]
        if weighted and mean:
            values = [_as_float(value) for value in values]
        result = gradients.reduce_values(
            collectives,
            values,
            label,
            weighted,
            collectives.gradient_dtype if gradients_only else tf.float32,
            self._sums(of_optimizer) if gradients_only else None,
        )
        if weighted and backward and not mean:
            # The value is the gradient of a sum over the ranks, so it belongs
            # to all ranks. It will be weighted by this rank's samples, and
            # `total_of` compensates for that.
            return [whole_batch.total_of(value) for value in result]
        if weighted or not mean:
            return result
        return [
            tf.math.divide(
                value, tf.cast(collectives.group.world_size, value.dtype)
            )
            for value in result
        ]

    def _is_on_whole_batch(self) -> bool:
        """Whether a loss or a metric is computed on the global batch."""
        current = self.collectives.step if self.collectives else None
        return current is not None and current.whole

    def _gather_to_implementation(
        self,
        value: TensorLike,
        destinations: Destinations,
        axis: int,
        options: ReduceOptions,
    ) -> tf.Tensor:
        if self.collectives is None or self._is_on_whole_batch():
            # The stock method rejects values of a replica, which have no
            # device.
            return tf.convert_to_tensor(local_value(value))
        value = tf.convert_to_tensor(local_value(value))
        current = self.collectives.step
        if current is not None and current.checking:
            return value
        if axis == 0:  # Any number of dimensions, also an unknown one.
            return self.collectives.all_gather(value, "gather")
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        gathered = self.collectives.all_gather(
            tf.transpose(value, order), "gather"
        )
        return tf.transpose(gathered, order)


def _of_one_process(value: TensorOrSlices) -> TensorOrSlices:
    """Returns the value unreduced: every rank has the global batch."""
    if isinstance(value, tf.IndexedSlices):
        return value
    return tf.convert_to_tensor(value)


def _may_be_gradients(
    values: list[TensorOrSlices], gradients_only: bool
) -> bool:
    # A single scalar is a count or a similar number that a step sums.
    alone = len(values) == 1 and tf.TensorShape(values[0].shape).rank == 0
    return gradients_only and not alone


def _as_float(value: TensorOrSlices) -> TensorOrSlices:
    """A value that has a mean; integers become float64, as in TensorFlow."""
    if isinstance(value, tf.IndexedSlices) or not value.dtype.is_integer:
        return value
    return tf.cast(value, tf.float64)


def local_value(value: TensorLike) -> TensorLike:
    """Value of this rank's only replica."""
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values[0]
    return value
