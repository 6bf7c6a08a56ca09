# SPDX-License-Identifier: Apache-2.0
"""Starts ranks: on a port that is taken, and more of them than ten.

One step on 1, 11 and 16 ranks must give the same tables and biases. On 16 it
is a graph; on 11, where most of the time would be spent on tracing, it is not.
The 11 have no TF_CONFIG, but what mpirun tells its processes.

TensorFlow is loaded once and the ranks are forked, before it has started any
thread: 16 ranks then need seconds and little memory.
"""

import functools
import json
import os
import socket
import sys
import traceback

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.comm import listener
from tfdist_ext.layers import FullSparse

keras = tf.keras
ROWS, UNITS, BATCH = 35, 16, 40


def environments(ranks, addresses):
    """Says to each rank which it is; with 16 the first one is the chief."""
    if ranks == 1:
        return [{}]
    if ranks == 11:
        return [of_mpi(rank, ranks) for rank in range(ranks)]
    chief = addresses[:1]
    workers = addresses[len(chief) :]
    cluster = {"worker": workers, **({"chief": chief} if chief else {})}
    tasks = [{"type": "chief", "index": 0} for _ in chief]
    tasks += [{"type": "worker", "index": i} for i in range(len(workers))]
    configs = [{"cluster": cluster, "task": task} for task in tasks]
    return [
        {"TF_CONFIG": json.dumps(config), "TFDIST_PORT_IS_HELD": "1"}
        for config in configs
    ]


def of_mpi(rank, ranks):
    """What mpirun tells a process on the one host of its job."""
    values = {"RANK": rank, "SIZE": ranks}
    local = {f"LOCAL_{name}": value for name, value in values.items()}
    return {
        "PMIX_NAMESPACE": f"start_program {os.getpid()}",
        **{
            f"OMPI_COMM_WORLD_{name}": str(value)
            for name, value in {**values, **local}.items()
        },
    }


def train(eagerly):
    """One step on one global batch; a table by row, another by column."""
    strategy = tfdist_ext.HybridParallelStrategy()
    ids = np.arange(BATCH * 2).reshape(BATCH, 2) * 3 % ROWS
    labels = np.linspace(-1, 1, BATCH)[:, None]
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)
    with strategy.scope():
        inputs = keras.Input((2,), dtype="int64")
        sparse = [
            FullSparse(UNITS, ROWS, sharding=way, kernel_initializer=start)
            for way, start in (("row", "ones"), ("column", "ones"))
        ]
        product = keras.layers.Multiply()([layer(inputs) for layer in sparse])
        top = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Model(inputs, top(product))
        optimizer = tfdist_ext.optimizers.SGD(1e-3)
        model.compile(optimizer, "mse", run_eagerly=eagerly)
    logs = model.fit(data, verbose=0).history
    tables = [strategy.gather_table(layer) for layer in sparse]
    if strategy.process_group is not None:
        strategy.process_group.close()  # a forked process runs no atexit
    result = [logs["loss"], *tables, *top.get_weights()]
    return result, strategy.rank, strategy.world_size


def start(environment, body):
    """Forks a process that is a rank and runs `body`; returns its number."""
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        os.environ.update(OMP_NUM_THREADS="1", TF_NUM_INTRAOP_THREADS="1")
        os.environ.update(environment)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def check_taken_port():
    """An error names the address of a rank whose port somebody has.

    Ranks of one host have no port where they have no secret.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def body():
            try:
                tfdist_ext.HybridParallelStrategy()
            except RuntimeError as error:
                assert f"at its address {address!r}" in str(error)
            else:
                raise AssertionError("started")

        task = {"type": "worker", "index": 0}
        cluster = {"worker": [address, "127.0.0.1:1"]}
        config = json.dumps({"cluster": cluster, "task": task})
        environment = {"TF_CONFIG": config, "TFDIST_SECRET": 32 * "0"}
        assert os.waitpid(start(environment, body), 0)[1] == 0


def train_as(rank, path, eagerly):
    """Trains and writes what has come of it."""
    result, own_rank, _ = train(eagerly)
    assert own_rank == rank, (own_rank, rank)
    np.savez(path, *result)


def run(ranks, folder, eagerly):
    """Results of all ranks, in rank order."""
    paths = [f"{folder}/{ranks}-{rank}.npz" for rank in range(ranks)]
    with listener.reserve_ports(ranks, "127.0.0.1") as reserved:
        addresses = [f"127.0.0.1:{port}" for port in reserved]
        pids = [
            start(each, functools.partial(train_as, rank, path, eagerly))
            for rank, (each, path) in enumerate(
                zip(environments(ranks, addresses), paths, strict=True)
            )
        ]
        codes = [os.waitpid(pid, 0)[1] for pid in pids]
    assert not any(codes), codes
    return [list(np.load(path).values()) for path in paths]


def main():
    (folder,) = sys.argv[1:]
    check_taken_port()
    (expected,) = run(1, folder, eagerly=True)
    assert (expected[1] != 1).any() and (expected[2] != 1).any()
    for ranks, eagerly in ((11, True), (16, False)):
        for result in run(ranks, folder, eagerly):
            for a, b in zip(result, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5)


if __name__ == "__main__":
    main()
