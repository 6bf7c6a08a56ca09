# SPDX-License-Identifier: Apache-2.0
"""A process has several strategies, of several sizes, and ops before them.

Runs on 3 ranks. Whatever the strategy, a model trains as in one process.
"""

import json
import os
import pathlib
import socket

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras
ROWS, BATCH = 31, 12


def train(strategy):
    """Losses and weights of two epochs."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, ROWS, (2 * BATCH, 3))
    labels = rng.normal(size=(2 * BATCH, 1)).astype(np.float32)
    with strategy.scope():
        sparse = tfdist_ext.layers.FullSparse(
            4, ROWS, kernel_initializer="ones"
        )
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((3,), dtype="int64")])
        model.add(sparse)
        model.add(dense)
        model.compile(tfdist_ext.optimizers.Adagrad(0.1), "mse")
    data = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(BATCH)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    return [losses, strategy.gather_table(sparse), *dense.get_weights()]


def listening():
    """Local addresses, in hexadecimal, where this process listens."""
    links = (
        pathlib.Path("/proc/self/fd") / fd for fd in os.listdir("/proc/self/fd")
    )
    mine = set()
    for link in links:
        try:
            mine.add(os.readlink(link))
        except OSError:  # the one that listed them
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for row in pathlib.Path(f"/proc/net/{table}").read_text().splitlines():
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                found.add(fields[1].partition(":")[0])
    return found


def place(rank, ranks, port):
    """Makes this process a rank of another job."""
    workers = [f"127.0.0.1:{port}"] + [
        f"127.0.0.1:{r}" for r in range(1, ranks)
    ]
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": workers}, "task": task}
    )


def main():
    before = tf.random.uniform([3]) * 0  # TensorFlow is in use already
    with tfdist_ext.HybridParallelStrategy() as strategy:
        rank = strategy.rank
        assert strategy.world_size == 3
        results = [train(strategy)]
        # Nobody from elsewhere is heard, and no server's threads wait.
        assert listening() <= {"0100007F"}, listening()
        threads = os.listdir("/proc/self/task")
        assert len(threads) < 40, len(threads)
        try:  # not installed, or it has not started these ranks
            tfdist_ext.HybridParallelStrategy(engine="horovod")
        except (ImportError, RuntimeError) as error:
            assert "engine='horovod'" in str(error), error
        else:
            raise AssertionError("Horovod knows nothing of these ranks")
        second = tfdist_ext.HybridParallelStrategy()
        results.append(train(second))
        if rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            strategy.process_group.insert_key("port", f"{port}")
        port = int(strategy.process_group.await_key("port", 60.0))
        strategy.collectives.barrier("all know the port")
    try:
        strategy.collectives.barrier("closed")
    except tf.errors.FailedPreconditionError as error:
        assert "no open process group" in str(error)
    else:
        raise AssertionError("a closed strategy has exchanged something")
    second.collectives.barrier("open")
    second.close()
    if rank < 2:  # without the third
        place(rank, 2, port)
        with tfdist_ext.HybridParallelStrategy() as strategy:
            assert strategy.world_size == 2
            results.append(train(strategy))
    del os.environ["TF_CONFIG"]
    expected = train(tfdist_ext.HybridParallelStrategy())
    assert expected[0][1] < expected[0][0]
    for result in results:
        for found, alone in zip(result, expected, strict=True):
            np.testing.assert_allclose(found, alone, rtol=1e-5, atol=1e-6)
    assert not before.numpy().any()


if __name__ == "__main__":
    main()
