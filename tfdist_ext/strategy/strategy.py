# SPDX-License-Identifier: Apache-2.0
"""The strategy: its difference from stock MultiWorkerMirroredStrategy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm import measuring
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.embedding import whole_tables
from tfdist_ext.numbers import check
from tfdist_ext.numbers import check_report
from tfdist_ext.numbers.check_report import CheckReport
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.patching import release
from tfdist_ext.strategy import bootstrap
from tfdist_ext.strategy import bootstrap as engine_lib
from tfdist_ext.strategy import cluster as cluster_lib
from tfdist_ext.strategy import extended as extended_lib
from tfdist_ext.strategy import input as input_lib
from tfdist_ext.strategy import logs
from tfdist_ext.strategy import predictions
from tfdist_ext.strategy import refused
from tfdist_ext.strategy import reporter
from tfdist_ext.strategy import state
from tfdist_ext.strategy.gradients import ErrorFeedback
from tfdist_ext.strategy.input import DatasetNames
from tfdist_ext.tables import checks

Nest = Any


class HybridParallelStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Data-parallel dense layers, partitioned sparse layers, one `fit`.

    Dense variables are mirrored on all ranks and their gradients summed;
    tables of `tfdist_ext.layers` are partitioned over the ranks. One process
    per rank, started with TF_CONFIG, as by `tfdist-run`, or by srun, mpirun
    and such; without any, one process that gives the same results.

        strategy = tfdist_ext.HybridParallelStrategy()
        with strategy.scope():
            model = keras.Sequential(
                [tfdist_ext.layers.FullSparse(64), keras.layers.Dense(1)]
            )
            model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
        model.fit(dataset)  # batched by the global batch size

    Args:
        timeout: seconds that a rank waits for its peers in one exchange
            before it names the silent ones and fails. While a peer is alive
            and in no exchange (it reads, traces, saves), the others warn
            and wait for up to five times as long.
        startup_timeout: seconds that ranks wait for each other to start.
        cluster_resolver: as of the stock strategy; default TF_CONFIG,
            else what srun, mpirun and such say.
        gradient_dtype: in which float32 gradients of dense layers travel:
            "float32", or "bfloat16" or "float16" for half the bytes. They
            are rounded on the way and added up in float32; all ranks get
            equal sums.
        error_feedback: whether what is lost by that rounding is added to
            the gradients of the next step, so that it does not add up.
            Costs float32 memory of 1 + 1 / world_size times the dense
            layers.
        measure: whether ranks measure their links and memory once, in less
            than a second, for the plans of tables (`measure_machine`).
            Otherwise plans are made for the defaults of `tfdist_ext.plan`.
        transport: "auto" lets ranks of one host talk through memory, 2 MiB
            for each two, where their containers allow it; "tcp" never does.
        engine: "horovod" lets the user's Horovod carry what layers and
            gradients exchange (by MPI, NCCL or Gloo, as it is built), started
            by horovodrun or mpirun; the ranks still meet, agree and name
            failures by this package, "tfdist", which otherwise does all.
        check: whether the first step of a `fit` is compared with what one
            process computes, before it is trained. "auto" does that where a
            model has a `train_step`, a loss method or state of its own, and
            memory allows; "always" for every model; "error" likewise, and
            raises where they differ; "off" never, nor compares replicas. "auto"
            leaves it to `tfdist-run --check`.
        allow_unauthenticated: whether ranks start without a secret
            (`TFDIST_SECRET`) where other users or hosts reach them. Otherwise
            they then raise, and on loopback accept their own user only.

    Raises:
        ValueError: for a TF_CONFIG that is malformed or has other tasks than
            chief and workers, another `gradient_dtype`, `transport`,
            `engine` or `check`, or `error_feedback` where nothing is rounded;
            or if other hosts reach the ranks and there is no secret.
        RuntimeError: another launcher has started several processes and not
            said how they meet, rank 0's port is taken, not all ranks came
            within `startup_timeout`, or Horovod knows other ranks.
        ImportError: engine="horovod", and it is not built for this TensorFlow.
    """

    def __init__(
        self,
        timeout: float = 60.0,
        startup_timeout: float = 300.0,
        cluster_resolver: (
            tf.distribute.cluster_resolver.ClusterResolver | None
        ) = None,
        gradient_dtype: checks.WireDtype = "float32",
        error_feedback: bool = False,
        measure: bool = False,
        transport: checks.Transport = "auto",
        engine: checks.Engine = "tfdist",
        check: checks.Check = "auto",
        allow_unauthenticated: bool = False,
    ) -> None:
        where = type(self).__name__
        dtypes = checks.WIRE_DTYPES
        checks.one_of("gradient_dtype", gradient_dtype, dtypes, where)
        checks.one_of("transport", transport, checks.TRANSPORTS, where)
        checks.one_of("engine", engine, checks.ENGINES, where)
        checks.one_of("check", check, checks.CHECKS, where)
        mode = check_report.mode_of(check, os.environ)
        if error_feedback and gradient_dtype == "float32":
            raise ValueError(
                "Argument `error_feedback` is for gradients that are rounded."
                " Received: error_feedback=True with gradient_dtype="
                "'float32'. Set gradient_dtype='bfloat16', or leave it out."
            )
        resolver, cluster = bootstrap.locate(
            cluster_resolver, startup_timeout, allow_unauthenticated
        )
        group = bootstrap.connect(
            cluster,
            timeout,
            startup_timeout,
            transport,
            allow_unauthenticated,
        )
        self.collectives: Collectives | None = None
        self._reporter = reporter.start_reporter(group, os.environ)
        if group is not None:
            self.collectives = Collectives(group, tf.as_dtype(gradient_dtype))
            self.collectives.check = mode
        try:
            bootstrap.connect_gpus(self.collectives)
            if engine == "horovod" and self.collectives is not None:
                engine_lib.start_horovod(self.collectives)
            self._start(resolver, cluster, error_feedback, measure)
        except BaseException:  # the others shall not wait for this rank
            self.close()
            raise

    def _start(
        self,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        cluster: cluster_lib.Cluster,
        error_feedback: bool,
        measure: bool,
    ) -> None:
        extended = extended_lib.HybridParallelExtended(
            self, resolver, cluster, self.collectives
        )
        tf.distribute.Strategy.__init__(self, extended)
        self._names = DatasetNames()
        hold(Need.STRATEGY, self)
        hold(Need.VARIABLES, extended)
        several = self.collectives is not None
        reporter.shorten_tracebacks(f"rank {self.rank}: " if several else "")
        if self.collectives is not None:
            bootstrap.serve_keys(self.collectives.group)
            if error_feedback:
                extended.error_feedback = ErrorFeedback(self.collectives)
            bootstrap.share_seeds(self.collectives)
            hold(Need.RANKS, self)
            if measure:
                self.collectives.machine = measuring.measure_machine(self)

    def close(self) -> None:
        """Leaves the other ranks in good order.

        What the strategy has made can be read and saved by one process as it
        is on this rank; exchanges raise `FailedPreconditionError`. The process
        may make another strategy, of other ranks too. Runs by itself when
        Python exits; the other ranks see no failure in it. Every rank should
        close when all are done with what they do together.
        """
        release(self)
        self._reporter.close()
        if self.collectives is not None:
            self.collectives.group.close()

    def __enter__(self) -> HybridParallelStrategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

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

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that losses are divided by: one per process.

        In a step of Keras's loops one, as gradients are averaged there:
        neither Keras nor `tf.nn.compute_average_loss` divides a second time.
        """
        trial = self.collectives.trial if self.collectives else None
        if trial is not None and trial.whole:
            return 1
        current = self.collectives.step if self.collectives else None
        if current is None or tf.distribute.in_cross_replica_context():
            return int(super().num_replicas_in_sync)
        return 1 if current.weighted else self.world_size

    def run(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Nest:
        """Runs `fn` on this rank's replica, as the stock method.

        In Keras's loops `fn` is written as for one process: gradients and
        the scalars that it returns (loss and metrics) are averaged over the
        ranks, weighed by their samples.

        Args:
            fn: takes this rank's part of the batch; on all ranks the same.
            args: its positional arguments, as a dataset of this strategy
                yields them.
            kwargs: its keyword arguments.
            options: as of the stock method.

        Returns:
            What `fn` returns, of this rank.
        """
        trial = self.collectives.trial if self.collectives else None
        if trial is None:
            self._reporter.count_step()
        model = getattr(fn, "__self__", None)
        if self.collectives is None:
            refused.check_in_one_process(model)
            return super().run(fn, args, kwargs, options)
        if trial is None:  # a model of tf_keras may not be built yet
            refused.check_model(model)
        whole = trial is not None and trial.whole
        current = calls.Step(
            samples=calls.count_samples((args, kwargs or {})),
            weighted=whole or calls.is_keras_loop(fn),
            checking=whole,
            role=calls.role_of(fn),
            graph=internals.current_graph(),
            # A trial calls it from a function of its own.
            is_function=trial is None and hasattr(fn, "python_function"),
            merges_rows=_merges_rows(model),
        )
        with self.collectives.stepping(current):
            if trial is not None:
                fn = trial.marked(fn)
            trains = current.weighted and not whole
            if trains:
                logs.watch_results(model)
            outputs = super().run(fn, args, kwargs, options)
            state.settle(self.collectives, current)
            if not trains:
                return outputs
            with self.scope():
                return predictions.outputs_of(fn, outputs, self.collectives)

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: Nest, axis: Any
    ) -> Nest:
        """Reduces a value, or every value of a nest, over the ranks.

        Stock refuses nests and axes of scalars, which Keras 3 asks for.

        Args:
            reduce_op: "sum" or "mean".
            value: of this rank: a tensor, or a nest of tensors.
            axis: of the tensors, reduced as well; None for none.

        Returns:
            The reduced values in the same nest, on every rank.
        """
        stock_reduce = super().reduce

        def reduce_one(leaf: Any) -> Any:
            # Not `getattr` on distributed values: they reduce themselves.
            local = extended_lib.local_value(leaf)
            if isinstance(local, tf.Tensor) and marks.is_reduced(local):
                return local
            scalar = tf.TensorShape(getattr(local, "shape", ())).rank == 0
            return stock_reduce(reduce_op, leaf, None if scalar else axis)

        return tf.nest.map_structure(reduce_one, value)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: Any = None
    ) -> tf.data.Dataset:
        """This rank's part of a dataset batched by the global batch size.

        Args:
            dataset: whose auto-shard policy says what a rank reads and
                trains; every rank gives its own.
            options: as of the stock method.

        Returns:
            A dataset of this rank's batches; some may have no samples.

        Raises:
            ValueError: where ranks read data that do not go together.
        """
        if self.collectives is None:
            return super().experimental_distribute_dataset(dataset, options)
        if marks.is_distributed(dataset):
            return dataset
        with self.collectives.together("distribute a dataset", own_first=True):
            self.collectives.call_lock.check_input(dataset)
            local = input_lib.distribute(
                dataset, self.collectives, self._names.next(self.collectives)
            )
        batch = max(0, internals.batch_size_of(dataset))
        marks.set_distributed(local, -(-batch // self.world_size))
        self.distributed_spec = local.element_spec  # for `predictions`
        return local

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: Any = None,
    ) -> tf.data.Dataset:
        """The dataset that `dataset_fn` makes for this rank.

        Ranks that have fewer batches than others are padded with batches of
        zero samples.

        Args:
            dataset_fn: makes the dataset, of batches for one rank.
            options: as of the stock method.

        Returns:
            That dataset, padded.
        """
        if self.collectives is None:
            return super().distribute_datasets_from_function(
                dataset_fn, options
            )
        with self.collectives.together("distribute a dataset", own_first=True):
            dataset = dataset_fn(self.extended._make_input_context())
            self.collectives.call_lock.check_input(dataset)
            local = input_lib.own_batches(
                dataset, self.collectives, self._names.next(self.collectives)
            )
        marks.set_distributed(local, max(0, internals.batch_size_of(dataset)))
        return local

    def gather_table(
        self, layer: Any, path: str | os.PathLike[str] | None = None
    ) -> np.ndarray | None:
        """The whole table of a sparse layer, on every rank.

        All ranks must call it. For tables that fit into one process only,
        unless a path is given; checkpoints never gather.

        Args:
            layer: a layer with a `kernel`, or its kernel, or a slot of it.
            path: of a `.npy` file, which rank 0 writes in blocks of rows.

        Returns:
            `[rows, dim]`, float32; None with a path.

        Raises:
            ValueError: for a layer that has no kernel, or several tables.
        """
        variable = whole_tables.kernel_of(layer)
        if path is None:
            return whole_tables.gather(variable, self.collectives)
        whole_tables.write(variable, self.collectives, path)
        return None

    def check_step(
        self, step: Callable[[Nest], Nest], batch: Nest
    ) -> CheckReport:
        """Compares a step of a loop of your own with that of one process.

        Every rank runs it once on its batch, as `run` does, and on the batch
        of all ranks, with `num_replicas_in_sync` 1. Nothing is applied: all
        variables become again what they were. Rank 0 says what was found.

            report = strategy.check_step(train_step, next(iter(dataset)))
            assert report.ok, report

        Args:
            step: is given to `run`; takes the batch and may return numbers,
                of which the program takes the sum or the mean of the ranks.
            batch: of this rank, as a dataset of this strategy yields it.

        Returns:
            The same on all ranks.

        Raises:
            ValueError: on all ranks, for what cannot be compared.
        """
        if self.collectives is None:
            return CheckReport(True, ())
        with self.collectives.together("check_step", own_first=True):
            return check.check_step(self, step, batch)

    def statistics(self) -> dict[str, Any]:
        """What the process group has sent, received and waited for.

        Returns:
            Totals; `labels`, of each its calls, bytes sent and seconds; and
            `waited`, seconds of waiting by rank. Empty in one process.
        """
        group = self.process_group
        return dataclasses.asdict(group.stats()) if group else {}


def _merges_rows(model: Any) -> bool:
    """Whether the optimizer of a model sums gradients of equal rows first."""
    optimizer = getattr(model, "optimizer", None)
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(marks.does_work_over_ranks(optimizer))
