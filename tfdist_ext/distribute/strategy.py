# SPDX-License-Identifier: Apache-2.0
"""The strategy: its difference from stock MultiWorkerMirroredStrategy."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.distribute import bootstrap, gradients, input, keras_files, step
from tfdist_ext.distribute import collectives as collectives_lib
from tfdist_ext.distribute import tensorflow_internals as internals
from tfdist_ext.distribute.collectives import Collectives
from tfdist_ext.distribute.process_group import ProcessGroup
from tfdist_ext.sharding import checkpoint, sharded_variable

Nest = Any


class HybridParallelStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Data-parallel dense layers, partitioned sparse layers, one `fit`.

    Dense variables are mirrored on all ranks and their gradients summed;
    tables of `tfdist_ext.layers` are partitioned over the ranks. One process
    per rank, launched by TF_CONFIG; without it, one process that gives the
    same results.

        strategy = tfdist_ext.HybridParallelStrategy()
        with strategy.scope():
            model = keras.Sequential(
                [tfdist_ext.layers.FullSparse(64), keras.layers.Dense(1)]
            )
            model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
        model.fit(dataset)  # batched by the global batch size

    Args:
        timeout: seconds that a rank waits for its peers in one exchange
            before it names the silent ones and fails.
        startup_timeout: seconds that ranks wait for each other to start.
        cluster_resolver: as of the stock strategy; default TF_CONFIG.

    Raises:
        ValueError: for a TF_CONFIG with other tasks than chief and workers.
    """

    def __init__(
        self,
        timeout: float = 60.0,
        startup_timeout: float = 300.0,
        cluster_resolver: (
            tf.distribute.cluster_resolver.ClusterResolver | None
        ) = None,
    ) -> None:
        resolver = (
            cluster_resolver
            or tf.distribute.cluster_resolver.TFConfigClusterResolver()
        )
        bootstrap.prepare(resolver, timeout, startup_timeout)
        extended = _HybridParallelExtended(self, resolver)
        internals.Strategy.__init__(self, extended)
        self.collectives: Collectives | None = None
        self._datasets = 0
        if extended._num_workers > 1:
            group = bootstrap.connect(self, timeout)
            self.collectives = Collectives(group)
            extended.collectives = self.collectives
            bootstrap.share_seed(self.collectives)
            checkpoint.merge_shards_of_all_ranks()
            keras_files.install()

    @property
    def process_group(self) -> ProcessGroup | None:
        """The ranks and their connections; None with a single process."""
        return self.collectives.group if self.collectives else None

    @property
    def rank(self) -> int:
        """Index of this process."""
        return self.collectives.group.rank if self.collectives else 0

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.collectives.group.world_size if self.collectives else 1

    def run(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Nest:
        """Runs `fn` on this rank's replica, as the stock method.

        In Keras's loops the scalars that `fn` returns (loss and metrics) are
        averaged over the ranks in one exchange.
        """
        if self.collectives is None:
            return super().run(fn, args, kwargs, options)
        current = step.Step(
            samples=step.count_samples((args, kwargs or {})),
            weighted=step.is_keras_loop(fn),
        )
        with self.collectives.stepping(current):
            outputs = super().run(fn, args, kwargs, options)
            if current.weighted:
                outputs = self._mean_of_scalars(outputs)
        return outputs

    def _mean_of_scalars(self, outputs: Nest) -> Nest:
        flat = tf.nest.flatten(outputs)
        scalars = [
            i
            for i, value in enumerate(flat)
            if tf.is_tensor(value)
            and value.dtype.is_floating
            and value.shape.rank == 0
        ]
        assert self.collectives is not None
        means = self.collectives.all_reduce(
            [flat[i] / self.world_size for i in scalars], "logs", weighted=True
        )
        for i, mean in zip(scalars, means, strict=True):
            mean._tfdist_reduced = True
            flat[i] = mean
        return tf.nest.pack_sequence_as(outputs, flat)

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Nest, axis: Any
    ) -> Nest:
        """Reduces a value, or every value of a nest, over the ranks.

        Stock refuses nests and axes of scalars, which Keras 3 asks for.
        """

        def reduce_one(leaf: Any) -> Any:
            # Not `getattr` on distributed values: they reduce themselves.
            scalar = isinstance(leaf, tf.Tensor) and leaf.shape.rank == 0
            if scalar and hasattr(leaf, "_tfdist_reduced"):
                return leaf
            parent = super(HybridParallelStrategy, self)
            return parent.reduce(reduce_op, leaf, None if scalar else axis)

        return tf.nest.map_structure(reduce_one, value)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: Any = None
    ) -> tf.data.Dataset:
        """This rank's part of a dataset batched by the global batch size.

        See `tfdist_ext.distribute.input.distribute`.
        """
        if self.collectives is None:
            return super().experimental_distribute_dataset(dataset, options)
        if getattr(dataset, "_tfdist_distributed", False):
            return dataset
        local = input.distribute(dataset, self.collectives, self._input())
        local._tfdist_distributed = True
        return local

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: Any = None,
    ) -> tf.data.Dataset:
        """The dataset that `dataset_fn` makes for this rank.

        It yields per-rank batches; ranks that have fewer are padded with
        batches of zero samples.
        """
        if self.collectives is None:
            return super().distribute_datasets_from_function(
                dataset_fn, options
            )
        local = input.equal_steps(
            dataset_fn(self.extended._make_input_context()),
            self.collectives,
            self._input(),
        )
        local._tfdist_distributed = True
        return local

    def _input(self) -> str:
        self._datasets += 1
        return f"input{self._datasets}"

    def gather_table(self, layer: Any) -> np.ndarray:
        """The whole table of a sparse layer, on every rank.

        All ranks must call it. For tables that fit into one process only;
        checkpoints never gather.

        Args:
            layer: a layer with a `kernel`, or its kernel, or a slot of it.

        Returns:
            `[rows, dim]`, float32.
        """
        variable = getattr(layer, "kernel", layer)
        return sharded_variable.gather(variable, self.collectives)

    def statistics(self) -> dict[str, Any]:
        """What the process group has sent, received and waited for."""
        if self.collectives is None:
            return {}
        return dataclasses.asdict(self.collectives.group.stats())


class _HybridParallelExtended(internals.CollectiveAllReduceExtended):
    """Overrides for shards and for collectives through the process group."""

    # Our own control channel notices a dead peer at once.
    _enable_check_health = False

    def __init__(
        self,
        container_strategy: HybridParallelStrategy,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver,
    ) -> None:
        self.collectives: Collectives | None = None
        super().__init__(
            container_strategy,
            cluster_resolver=cluster_resolver,
            communication_options=(
                tf.distribute.experimental.CommunicationOptions()
            ),
        )

    def _initialize_local_devices(
        self, cluster_resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        # One replica per process: more GPUs are used by more ranks.
        devices, kind = super()._initialize_local_devices(
            cluster_resolver, worker_device
        )
        return devices[:1], kind

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        spec = sharded_variable.spec_for(kwargs.get("colocate_with"))
        if spec is None or self.collectives is None:
            return super()._create_variable(next_creator, **kwargs)
        for name in ("colocate_with", "use_resource", "distribute_strategy"):
            kwargs.pop(name, None)
        kwargs["synchronization"] = tf.VariableSynchronization.NONE
        kwargs["aggregation"] = tf.VariableAggregation.NONE
        with tf.device(self.worker_devices[0]):
            variable = next_creator(**kwargs)
        sharded_variable.mark(variable, spec, self.collectives)
        return variable

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
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
            name = kwargs.get("name") or "variable"
            return collectives.broadcast(value, f"initial_value/{name}")

        return broadcast_initial_value

    def variable_created_in_scope(self, v: Any) -> bool:
        return sharded_variable.is_shard(
            v
        ) or super().variable_created_in_scope(v)

    def _validate_colocate_with_variable(self, variable: Any) -> None:
        if not sharded_variable.is_shard(variable):
            super()._validate_colocate_with_variable(variable)

    def _update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        group: bool,
    ) -> Any:
        with self._after_checks():
            if not sharded_variable.is_shard(var):
                return super()._update(var, fn, args, kwargs, group)
            sharded_variable.check_update(var, fn, args)
            with tf.device(var.device), internals.UpdateContext(0):
                result = fn(var, *args, **kwargs)
        return tf.group(result) if group else result

    @contextlib.contextmanager
    def _after_checks(self) -> Iterator[None]:
        # A bad id fails the step on every rank; nothing may be written
        # before all ids of the step are known to be good.
        current = self.collectives.step if self.collectives else None
        with tf.control_dependencies(current.checks if current else None):
            yield

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        if self.collectives is None:
            return super()._reduce_to(reduce_op, value, destinations, options)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if isinstance(value, internals.Mirrored) and mean:
            return value
        return self._reduce_flat(mean, [_local(value)], "reduce")[0]

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> list[Any]:
        if self.collectives is None:
            return super()._batch_reduce_to(
                reduce_op, value_destination_pairs, options
            )
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        values = [_local(value) for value, _ in value_destination_pairs]
        return self._reduce_flat(mean, values, "gradients")

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Nest, options: Any = None
    ) -> Nest:
        if self.collectives is None:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        flat = tf.nest.flatten(value)
        reduced = self._reduce_flat(mean, flat, "gradients")
        return tf.nest.pack_sequence_as(value, reduced)

    def _reduce_flat(
        self, mean: bool, values: list[Any], label: str
    ) -> list[Any]:
        collectives = self.collectives
        assert collectives is not None
        current = collectives.step
        weighted = (
            current is not None
            and current.weighted
            and collectives_lib.is_gradient_reduction()
        )
        result = gradients.reduce_values(
            collectives, values, label, weighted
        )
        if not mean:
            return result
        return [
            tf.math.divide(value, tf.cast(collectives.group.world_size, value.dtype))
            for value in result
        ]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> tf.Tensor:
        if self.collectives is None:
            return super()._gather_to_implementation(
                value, destinations, axis, options
            )
        value = tf.convert_to_tensor(_local(value))
        order = list(range(value.shape.rank))
        order[0], order[axis] = order[axis], order[0]
        if axis == 0:
            return self.collectives.all_gather(value, "gather")
        gathered = self.collectives.all_gather(
            tf.transpose(value, order), "gather"
        )
        return tf.transpose(gathered, order)


def _local(value: Any) -> Any:
    """The value of this rank's only replica."""
    if isinstance(value, internals.DistributedValues):
        return value.values[0]
    return value
