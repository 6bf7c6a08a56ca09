# SPDX-License-Identifier: Apache-2.0
"""`HybridParallelStrategy`, a subclass of MultiWorkerMirroredStrategy."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import consistency as consistency_lib
from tfdist_ext import marks
from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import calls
from tfdist_ext.comm import measuring
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.comm.requests import Requests
from tfdist_ext.compression import Compression
from tfdist_ext.consistency import Consistency
from tfdist_ext.embedding import whole_tables
from tfdist_ext.numbers import check
from tfdist_ext.numbers import check_report
from tfdist_ext.numbers.check_report import CheckReport
from tfdist_ext.optimizers import supported
from tfdist_ext.patching import Need
from tfdist_ext.patching import hold
from tfdist_ext.patching import release
from tfdist_ext.strategy import balance as balance_lib
from tfdist_ext.strategy import bootstrap
from tfdist_ext.strategy import bootstrap as engine_lib
from tfdist_ext.strategy import cluster as cluster_lib
from tfdist_ext.strategy import extended as extended_lib
from tfdist_ext.strategy import input as input_lib
from tfdist_ext.strategy import logs
from tfdist_ext.strategy import predictions
from tfdist_ext.strategy import refused
from tfdist_ext.strategy import reporter
from tfdist_ext.strategy import sparse_sums
from tfdist_ext.strategy import state
from tfdist_ext.strategy.balance import Balance
from tfdist_ext.strategy.gradients import ErrorFeedback
from tfdist_ext.strategy.input import DatasetNames
from tfdist_ext.strategy.rounds import Rounds
from tfdist_ext.tables import checks
from tfdist_ext.type_names import InputOptions
from tfdist_ext.type_names import Layer
from tfdist_ext.type_names import Nest
from tfdist_ext.type_names import TensorLike


class HybridParallelStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """Trains mirrored dense layers and partitioned tables with one `fit`.

    Dense variables are mirrored on all ranks, and their gradients are summed.
    Tables of `tfdist_ext.layers` are partitioned over the ranks. Each rank is
    one process, started with TF_CONFIG (`tfdist-run` sets it) or by srun,
    mpirun or similar. Without a launcher one process gives the same results.

        strategy = tfdist_ext.HybridParallelStrategy()
        with strategy.scope():
            model = keras.Sequential(
                [tfdist_ext.layers.FullSparse(64), keras.layers.Dense(1)]
            )
            model.compile(tfdist_ext.optimizers.Adagrad(0.05), "mse")
        model.fit(dataset)  # batched by the global batch size

    Args:
        timeout: seconds that a rank waits for its peers in one exchange
            before it fails with an error that names the silent ranks. If a
            peer is alive but in no exchange (it reads, traces or saves),
            the other ranks warn and wait up to five times as long.
        startup_timeout: seconds that ranks wait for each other to start.
        cluster_resolver: resolver of the ranks, as for the stock strategy.
            By default the ranks are read from TF_CONFIG, else from the
            environment that srun, mpirun or a similar launcher sets.
        gradient_dtype: dtype in which float32 gradients of dense layers are
            sent: "float32", or "bfloat16" or "float16" for half the bytes.
            Gradients are rounded when they are sent and are added up in
            float32. All ranks get equal sums.
        error_feedback: whether the rounding error of a step is added to the
            gradients of the next step, so that errors do not accumulate.
            Takes float32 memory of 1 + 1 / world_size times the dense
            layers.
        measure: whether ranks measure their network and memory once, in less
            than a second, to plan placements (`measure_machine`). Otherwise
            plans use the defaults of `tfdist_ext.plan`.
        transport: "auto" lets ranks of one host exchange data through shared
            memory, 2 MiB for each pair of ranks, where their containers
            allow it. "tcp" never uses shared memory.
        engine: "tfdist" sends all data through this package. With "horovod"
            the user's Horovod (built with MPI, NCCL or Gloo, and started by
            horovodrun or mpirun) sends what layers and gradients exchange;
            this package still connects the ranks and reports failures.
        check: whether the first step of each `fit` is compared with the step
            that one process computes, before it is trained. "auto" compares
            a model that has a `train_step`, a loss method or state of its
            own, if memory allows; `tfdist-run --check` replaces "auto".
            "always" compares every model. "error" also compares every model,
            and raises at a difference. "off" compares neither the step nor
            the replicas.
        balance: how ranks divide each global batch. "equal" gives all
            equally many samples. "measured" lets slow ranks take fewer: the
            shares follow the time that each rank computes without waiting,
            and change at most every 200 steps; where a batch has
            RaggedTensors or SparseTensors, they are shares of its ids. "ids"
            gives all ranks equally many ids of these. A list has the share
            of each rank, such as `[3, 3, 1]`. Results do not depend on it.
        allow_unauthenticated: whether ranks may start without a secret
            (`TFDIST_SECRET`) where other users or hosts can connect to them.
            If False they raise there; on loopback they accept processes of
            their own user only.
        consistency: when ranks exchange what they train, an object of
            `tfdist_ext.consistency`; None means `BSP()`, which exchanges the
            gradients of every step.
        compression: `compression.TopK(share)` or `compression.RandomK(share)`
            sends only some of the values of each dense float32 gradient that
            an optimizer applies. Trained numbers then differ from those of
            one process by design; comparisons of steps (`check`) use complete
            gradients. Errors for the next step are not saved in checkpoints.
            It has no effect on tables, on other dtypes, and in one process.

    Raises:
        ValueError: TF_CONFIG is malformed or has tasks other than chief and
            workers; `gradient_dtype`, `transport`, `engine` or `check` is
            unknown; `balance` is not a valid name or list;
            `error_feedback` is set but nothing is rounded;
            `compression` is another object or is combined with a 16-bit
            `gradient_dtype`; or other hosts can connect to the ranks and
            there is no secret.
        tf.errors.InvalidArgumentError: the ranks have different values of
            `gradient_dtype`, `error_feedback`, `compression` or
            `consistency`.
        RuntimeError: another launcher started several processes and did not
            say how they connect, rank 0's port is in use, ranks are missing
            after `startup_timeout`, or Horovod has other ranks.
        TypeError: `consistency` is no object of `tfdist_ext.consistency`.
        ImportError: engine="horovod" and it is not built for this TensorFlow.
    """

    def __init__(
        self,
        timeout: float = 60.0,
        startup_timeout: float = 300.0,
        cluster_resolver: (
            tf.distribute.cluster_resolver.ClusterResolver | None
        ) = None,
        gradient_dtype: checks.GradientDtype = "float32",
        error_feedback: bool = False,
        measure: bool = False,
        transport: checks.Transport = "auto",
        engine: checks.Engine = "tfdist",
        check: checks.Check = "auto",
        allow_unauthenticated: bool = False,
        balance: checks.Balance | Sequence[float] = "equal",
        consistency: Consistency | None = None,
        compression: Compression | None = None,
    ) -> None:
        where = type(self).__name__
        refused.check_gradients(gradient_dtype, error_feedback, where)
        checks.one_of("transport", transport, checks.TRANSPORTS, where)
        checks.one_of("engine", engine, checks.ENGINES, where)
        checks.one_of("check", check, checks.CHECKS, where)
        mode = check_report.mode_of(check, os.environ)
        self._consistency = consistency_lib.checked(consistency)
        if consistency_lib.is_asynchronous(self._consistency):
            refused.check_alone(self._consistency, gradient_dtype, where)
        sparse_sums.check(compression, gradient_dtype, self._consistency, where)
        resolver, cluster = bootstrap.locate(
            cluster_resolver, startup_timeout, allow_unauthenticated
        )
        world_size = max(1, len(cluster.addresses))
        balance_lib.check(balance, world_size, where)
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
            self._compress(compression)
            self.extended.balance = Balance(balance, world_size)
            self._reporter.shares = lambda: self.extended.balance.shares
        except BaseException:  # Peers must not wait for this rank.
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
        several = self.collectives is not None
        mode = consistency_lib.effective(self._consistency, several)
        self._consistency = mode
        asynchronous = consistency_lib.is_asynchronous(mode)
        if asynchronous and self.collectives is not None:
            bounds = consistency_lib.bounds_of(mode)
            requests = Requests(self.collectives.group, *bounds)
            self.collectives.requests = requests
            self._reporter.staleness = requests.counts_of_staleness
        if not isinstance(mode, consistency_lib.BSP):
            extended.rounds = Rounds(
                *(self, self._consistency, self.collectives),
                extended.sum_deferred,
            )
        self._names = DatasetNames()
        hold(Need.STRATEGY, self)
        hold(Need.VARIABLES, extended)
        reporter.shorten_tracebacks(f"rank {self.rank}: " if several else "")
        if self.collectives is not None:
            bootstrap.serve_keys(self.collectives.group)
            if error_feedback:
                extended.error_feedback = ErrorFeedback(self.collectives)
            bootstrap.share_seeds(self.collectives)
            hold(Need.RANKS, self)
            if measure:
                self.collectives.machine = measuring.measure_machine(self)

    def _compress(self, compression: Compression | None) -> None:
        """Compares how the ranks send gradients, and sets their sums."""
        if self.collectives is None:
            return
        dtype = self.collectives.gradient_dtype.name
        feedback = self.extended.error_feedback is not None
        self.collectives.group.check_same(
            [
                f"HybridParallelStrategy(gradient_dtype={dtype!r}, "
                f"error_feedback={feedback}, compression={compression}, "
                f"consistency={self._consistency})"
            ]
        )
        if compression is not None:
            self.extended.sparse_sums = sparse_sums.sums_of(
                compression, self.collectives
            )

    def close(self) -> None:
        """Closes the connections to the other ranks without an error.

        This process can still read and save what the strategy has created,
        with the values of this rank. Exchanges raise
        `FailedPreconditionError`.
        The process may create another strategy, also with other ranks.
        Python calls this method at exit, and the other ranks do not report a
        failure then. Each rank should close the strategy only after all ranks
        have completed their joint calls.
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
        """Process group of the ranks; None with a single process."""
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

        It is 1 in a step of Keras's loops, because gradients are averaged
        there. Keras and `tf.nn.compute_average_loss` then do not divide a
        second time.
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
        args: Sequence[Nest] = (),
        kwargs: dict[str, Nest] | None = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Nest:
        """Runs `fn` on this rank's replica, like the stock method.

        In Keras's loops `fn` is written as for one process. Gradients and
        the scalars that `fn` returns (loss and metrics) are averaged over
        the ranks, weighted by each rank's number of samples.

        Args:
            fn: function of this rank's part of the batch; the same function
                on all ranks.
            args: positional arguments of `fn`, as a dataset of this strategy
                yields them.
            kwargs: keyword arguments of `fn`.
            options: passed to the stock method.

        Returns:
            The result of `fn` on this rank.
        """
        trial = self.collectives.trial if self.collectives else None
        if trial is None:
            self._reporter.count_step()
        model = getattr(fn, "__self__", None)
        if self.extended.rounds is not None:
            refused.check_consistency(model, self._consistency)
        if self.collectives is None:
            refused.check_in_one_process(model)
            with self._stepping_alone(fn, args, kwargs):
                return super().run(fn, args, kwargs, options)
        if trial is None:  # A model of tf_keras may not be built yet.
            refused.check_model(model)
        current = self._step_of(fn, args, kwargs)
        requests = self.collectives.requests
        with self.collectives.stepping(current):
            if trial is not None:
                fn = trial.marked(fn)
            trains = current.weighted and not current.checking
            if trains:
                logs.watch_results(model)
            outputs = super().run(fn, args, kwargs, options)
            if requests is not None and current.asynchronous:
                requests.start()
                requests.tick(current.samples)
            state.settle(self.collectives, current)
            if not trains:
                return outputs
            with self.scope():
                return predictions.outputs_of(fn, outputs, self.collectives)

    def _step_of(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: dict[str, Nest] | None,
    ) -> calls.Step:
        """The step of several ranks that calls a function."""
        assert self.collectives is not None
        trial = self.collectives.trial
        whole = trial is not None and trial.whole
        trains = trial is None and not calls.is_evaluation(fn)
        return calls.Step(
            samples=calls.count_samples((args, kwargs or {})),
            weighted=whole or calls.is_keras_loop(fn),
            checking=whole,
            role=calls.role_of(fn),
            graph=internals.current_graph(),
            # A trial (a run of a check) calls `run` in its own function.
            is_function=trial is None and hasattr(fn, "python_function"),
            merges_rows=supported.merges_rows(getattr(fn, "__self__", None)),
            model=calls.model_of(fn),
            asynchronous=trains and self.collectives.requests is not None,
        )

    def _stepping_alone(
        self,
        fn: Callable[..., Nest],
        args: Sequence[Nest],
        kwargs: dict[str, Nest] | None,
    ) -> contextlib.AbstractContextManager[None]:
        """A context that makes a step of one process known to its rounds."""
        rounds = self.extended.rounds
        if rounds is None:
            return contextlib.nullcontext()
        samples = calls.count_samples((args, kwargs or {}))
        return rounds.stepping(calls.Step(samples, calls.is_keras_loop(fn)))

    def synchronize(self) -> None:
        """Ends the current round of `consistency`; all ranks must call this.

        `Accumulate` applies the gradients that it has summed, `LocalSteps`
        takes the mean of the ranks' weights. `fit` does so at the end of
        every epoch, and so do methods that evaluate, save and export models.
        A custom training loop should call it where its epochs end. With `BSP`
        it does nothing.
        """
        if self.extended.rounds is not None:
            self.extended.rounds.end()

    def reduce(
        self,
        reduce_op: tf.distribute.ReduceOp | str,
        value: Nest,
        axis: int | None,
    ) -> Nest:
        """Reduces a value, or each value of a nest, over the ranks.

        The stock method rejects nests, and an axis for scalars. Keras 3 uses
        both.

        Args:
            reduce_op: "sum" or "mean".
            value: this rank's tensor, or a nest of tensors.
            axis: axis of the tensors that is reduced as well, or None.

        Returns:
            The reduced values in the same nest, on every rank.
        """
        stock_reduce = super().reduce

        def reduce_one(leaf: TensorLike) -> TensorLike:
            # `getattr` on distributed values would reduce them.
            local = extended_lib.local_value(leaf)
            if isinstance(local, tf.Tensor) and marks.is_reduced(local):
                return local
            scalar = tf.TensorShape(getattr(local, "shape", ())).rank == 0
            return stock_reduce(reduce_op, leaf, None if scalar else axis)

        return tf.nest.map_structure(reduce_one, value)

    def experimental_distribute_dataset(
        self, dataset: tf.data.Dataset, options: InputOptions = None
    ) -> tf.data.Dataset:
        """This rank's part of a dataset batched by the global batch size.

        Args:
            dataset: dataset of this rank. Its auto-shard policy determines
                what the rank reads and trains.
            options: passed to the stock method.

        Returns:
            A dataset of this rank's batches. Some batches may have no
            samples.

        Raises:
            ValueError: the datasets of the ranks do not match.
        """
        if self.collectives is None:
            return super().experimental_distribute_dataset(dataset, options)
        if marks.is_distributed(dataset):
            return dataset
        with self.collectives.joint_call(
            "distribute a dataset", own_error_first=True
        ):
            self.collectives.call_lock.check_input(dataset)
            local = input_lib.distribute(
                dataset,
                self.collectives,
                self._names.next(self.collectives),
                self.extended.balance,
            )
        batch = max(0, internals.batch_size_of(dataset))
        marks.set_distributed(local, -(-batch // self.world_size))
        self.distributed_spec = local.element_spec  # Read by `predictions`.
        return local

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: InputOptions = None,
    ) -> tf.data.Dataset:
        """Dataset of this rank, created by `dataset_fn`.

        If a rank has fewer batches than another, batches of zero samples are
        appended.

        Args:
            dataset_fn: creates the dataset of per-rank batches.
            options: passed to the stock method.

        Returns:
            The dataset, with as many batches as on every other rank.
        """
        if self.collectives is None:
            return super().distribute_datasets_from_function(
                dataset_fn, options
            )
        with self.collectives.joint_call(
            "distribute a dataset", own_error_first=True
        ):
            dataset = dataset_fn(self.extended._make_input_context())
            self.collectives.call_lock.check_input(dataset)
            local = input_lib.own_batches(
                dataset, self.collectives, self._names.next(self.collectives)
            )
        marks.set_distributed(local, max(0, internals.batch_size_of(dataset)))
        return local

    def gather_table(
        self, layer: Layer, path: str | os.PathLike[str] | None = None
    ) -> np.ndarray | None:
        """The entire table of a sparse layer, on every rank.

        All ranks must call this method. Without `path` the table must fit
        into the memory of one process. Checkpoints never gather a table.

        Args:
            layer: layer with a `kernel`, or its kernel, or a slot of it.
            path: path of a `.npy` file, which rank 0 writes in blocks of
                rows; None returns the table.

        Returns:
            `[rows, dim]`, float32; None if a path is given.

        Raises:
            ValueError: the layer has no kernel, or several tables.
        """
        variable = whole_tables.kernel_of(layer)
        if path is None:
            return whole_tables.gather(variable, self.collectives)
        whole_tables.write(variable, self.collectives, path)
        return None

    def check_step(
        self, step: Callable[[Nest], Nest], batch: Nest
    ) -> CheckReport:
        """Compares a step of a custom training loop with that of one process.

        Every rank runs the step twice: on its batch, as `run` does, and on
        the batches of all ranks, with `num_replicas_in_sync` 1. Afterwards
        all variables are restored. Rank 0 logs the result.

            report = strategy.check_step(train_step, next(iter(dataset)))
            assert report.ok, report

        Args:
            step: function that is passed to `run`. It takes the batch and
                may return numbers that the program sums or averages over the
                ranks.
            batch: batch of this rank, as a dataset of this strategy yields
                it.

        Returns:
            The report, equal on all ranks.

        Raises:
            ValueError: the step cannot be compared; raised on all ranks.
        """
        if self.collectives is None:
            return CheckReport(True, ())
        with self.collectives.joint_call("check_step", own_error_first=True):
            return check.check_step(self, step, batch)

    def statistics(self) -> dict[str, Any]:
        """Bytes and seconds of the exchanges of this rank.

        Returns:
            Totals; `labels`, which maps a label to its calls, bytes sent and
            seconds; `waited`, seconds of waiting for each rank; `shares`,
            the current share of each rank in a batch; and, with `SSP` and
            `BAP`, `staleness`: updates of rows and variables of this rank by
            how many steps old the values were that they were computed from.
            With `ASP` it has `dense_held_back` and `rows_held_back` of this
            rank, and with `row_cache` its `row_cache_hits`. Empty in a single
            process.
        """
        group = self.process_group
        if group is None:
            return {}
        shares = self.extended.balance.shares
        found = {**dataclasses.asdict(group.stats()), "shares": shares}
        requests = self.collectives.requests if self.collectives else None
        if requests is not None:
            found["staleness"] = requests.updates_by_staleness()
        rounds = self.extended.rounds
        counts = rounds.counts() if rounds is not None else None
        if rounds is not None and counts is not None:
            found.update(rounds.shares(counts))
        return found
