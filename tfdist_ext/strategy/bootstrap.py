# SPDX-License-Identifier: Apache-2.0
"""Start of a rank: finds the other ranks, connects, shares the seeds."""

from __future__ import annotations

import dataclasses
import http
import http.client
import importlib
import json
import logging
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.comm import addresses as addresses_lib
from tfdist_ext.comm import connection
from tfdist_ext.comm import connector
from tfdist_ext.comm import gpus
from tfdist_ext.comm import handshake as secret_lib
from tfdist_ext.comm import listener
from tfdist_ext.comm import mesh
from tfdist_ext.comm import ranks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.comm.connection import Connection
from tfdist_ext.comm.listener import Listening
from tfdist_ext.comm.process_group import ALL_REDUCE_VARIABLE
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.launch.launched import Launched
from tfdist_ext.ops.horovod_ops import HorovodOps
from tfdist_ext.strategy import cluster as cluster_lib
from tfdist_ext.strategy.cluster import Cluster
from tfdist_ext.tables import checks
from tfdist_ext.type_names import ClusterResolver
from tfdist_ext.type_names import JsonObject

_LOG = logging.getLogger(__name__)
_THREADS = "TF_NUM_INTRAOP_THREADS"


def take_share_of_host(launched: Launched) -> None:
    """Takes one GPU and a share of the cores, unless the user chose them.

    Args:
        launched: this rank. If it is the only rank of its host, it takes all.
    """
    if launched.local_size == 1:
        return
    try:
        _take_gpu(launched)
        _take_cores(launched)
    except RuntimeError as error:  # TensorFlow has initialized its devices.
        _LOG.warning(
            "tfdist_ext: rank %d cannot take its share of the GPUs and cores "
            "that %d ranks of this host use (%s). Create the strategy before "
            "the first tensor, or set CUDA_VISIBLE_DEVICES and %s.",
            launched.rank,
            launched.local_size,
            error,
            _THREADS,
        )


def _take_gpu(launched: Launched) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    all_visible = tf.config.get_visible_devices("GPU") == gpus
    if all_visible and len(gpus) >= launched.local_size:
        tf.config.set_visible_devices(gpus[launched.local_rank], "GPU")


def _take_cores(launched: Launched) -> None:
    threading = tf.config.threading
    chosen = os.environ.get(_THREADS)
    if chosen or threading.get_intra_op_parallelism_threads():
        return
    cores = len(os.sched_getaffinity(0))
    # A launcher that binds its processes to cores has divided them already.
    if cores == os.cpu_count():
        share = max(1, cores // launched.local_size)
        threading.set_intra_op_parallelism_threads(share)


_REQUEST_SECONDS = 10.0
_LONGEST = 1024
_PATH = "/tfdist_ext/host_of_rank_0"


def put_text(store: tuple[str, int], text: str) -> None:
    """Stores a text in the key-value store of horovodrun.

    Args:
        store: host and port.
        text: ASCII text.

    Raises:
        RuntimeError: the store cannot be reached, or rejects the text.
    """
    _request(store, "PUT", text.encode("ascii"))


def get_text(store: tuple[str, int], timeout: float) -> str:
    """Waits until a rank has stored a text with `put_text`.

    Args:
        store: host and port.
        timeout: seconds to wait.

    Raises:
        RuntimeError: the store cannot be reached, or has no text in time.
    """
    began = time.monotonic()
    deadline = began + timeout
    while (text := _request(store, "GET")) is None:
        if time.monotonic() >= deadline:
            raise RuntimeError(
                "rank 0 did not write its address to the store of horovodrun "
                f"at {store[0]}, port {store[1]}, within "
                f"startup_timeout={timeout:g} s. Is it running?"
            )
        time.sleep(connector.pause(time.monotonic() - began))
    return text


def _request(
    store: tuple[str, int], method: str, body: bytes | None = None
) -> str | None:
    """Response of the store; None for status 404."""
    # urllib would use the proxies of the environment.
    connection = http.client.HTTPConnection(*store, timeout=_REQUEST_SECONDS)
    try:
        connection.request(method, _PATH, body)
        answer = connection.getresponse()
        text = answer.read(_LONGEST).decode("ascii")
        if answer.status == http.HTTPStatus.NOT_FOUND:
            return None
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"it answers {answer.status} to {method}")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise RuntimeError(
            f"the store of horovodrun at {store[0]}, port {store[1]}, which "
            f"has the address of rank 0, cannot be used: {error}. Set "
            "MASTER_ADDR to the host of rank 0 instead."
        ) from error
    finally:
        connection.close()
    return text


def share_a_host(addresses: Sequence[str]) -> bool:
    """Whether two ranks have the same host in addresses `host:port`."""
    hosts = [address.rpartition(":")[0] for address in addresses]
    return len(set(hosts)) < len(hosts)


def connect(
    cluster: Cluster,
    timeout: float,
    startup_timeout: float,
    transport: checks.Transport,
    allow_unauthenticated: bool = False,
) -> ProcessGroup | None:
    """Connects the ranks to each other.

    Args:
        cluster: the ranks.
        timeout: seconds that an exchange of the process group waits.
        startup_timeout: seconds that ranks wait for each other to start.
        transport: whether ranks of one host use shared memory.
        allow_unauthenticated: whether ranks may start without a secret where
            other users or hosts can connect to them.

    Returns:
        The connected process group; None for a single process.

    Raises:
        RuntimeError: the ranks did not connect.
        ValueError: the job needs a secret and has none, or the secret cannot
            be read; or a variable of the environment has an interface or port
            that this host does not have, or an invalid algorithm of sums or
            polling time.
    """
    addresses, rank = cluster.addresses, cluster.rank
    if len(addresses) < 2:
        return None
    if share_a_host(addresses):
        internals.stop_spinning()
    secret = secret_lib.find_secret(os.environ)
    check_secret(addresses[0], secret, allow_unauthenticated)

    def join() -> Sequence[Connection | None]:
        connections = mesh.connect(
            rank,
            addresses,
            secret=secret,
            timeout=startup_timeout,
            reuse_port=listener.HELD_VARIABLE in os.environ,
            listening=Listening.of(os.environ),
            share_memory=transport == "auto",
            allow_unauthenticated=allow_unauthenticated,
        )
        connection.poll_busily(connections, os.environ)
        return connections

    return ProcessGroup(
        rank=rank,
        world_size=len(addresses),
        addresses=addresses,
        connect=join,
        timeout=timeout,
        all_reduce=os.environ.get(ALL_REDUCE_VARIABLE, ""),
    )


def connect_gpus(collectives: Collectives | None) -> None:
    """Lets exchanges run on GPUs, and records which GPUs tables can use.

    Args:
        collectives: collectives of the strategy; None for a single process.
    """
    if collectives is not None:
        _, collectives.gpus = gpus.connect(
            collectives.group, os.environ, gpus.visible_device()
        )


def check_secret(
    address: str, secret: bytes, allow_unauthenticated: bool
) -> None:
    """Rejects ranks without a secret where other hosts can connect to them.

    Args:
        address: "host:port" of rank 0.
        secret: secret of the job, may be empty.
        allow_unauthenticated: whether the user allows this.

    Raises:
        ValueError: no secret; the error says how to set one.
    """
    where = addresses_lib.of_this_user(*addresses_lib.split(address))
    if secret or allow_unauthenticated or isinstance(where, str):
        return
    raise ValueError(
        f"The ranks of this job start at {address}, which other hosts may "
        "reach, and have no secret: anybody who connects would join the job. "
        f"Set {secret_lib.SECRET} to the same text for all ranks, or "
        f"{secret_lib.SECRET_FILE} to the path of a file that only you can "
        "read, with the output of `openssl rand -hex 32`. In a network that "
        "you trust, use HybridParallelStrategy(allow_unauthenticated=True) "
        "instead."
    )


def serve_keys(group: ProcessGroup) -> None:
    """Lets TensorFlow's preemption handlers use the group's key-value store."""

    def wait(key: str, timeout_in_ms: int = 0) -> str:
        return group.await_key(key, timeout_in_ms / 1000)

    def report(code: int, message: str) -> None:
        group.leave(f"error {code}: {message}")

    internals.serve_keys(group.insert_key, wait, report)


def locate(
    resolver: ClusterResolver | None,
    timeout: float,
    allow_unauthenticated: bool = False,
) -> tuple[ClusterResolver, Cluster]:
    """Finds the ranks by TF_CONFIG or the environment of another launcher.

    With another launcher this rank also takes its share of its host.

    Args:
        resolver: resolver of the user; None reads TF_CONFIG.
        timeout: seconds that ranks wait for each other.
        allow_unauthenticated: see `bootstrap.check_secret`.

    Returns:
        A resolver that knows all ranks, and the cluster that it returns.

    Raises:
        RuntimeError: the ranks cannot connect, or not all did within `timeout`.
        ValueError: TF_CONFIG is malformed, or an address cannot be used.
    """
    resolvers = tf.distribute.cluster_resolver
    resolver = resolver or resolvers.TFConfigClusterResolver()
    cluster = cluster_lib.read(resolver)
    launched = cluster.launched
    if launched is None:
        return resolver, cluster
    take_share_of_host(launched)
    if launched.store:
        launched = _ask_store(launched, timeout)
    own_host = _own_host(launched, timeout)
    secret = secret_lib.find_secret(os.environ)
    check_secret(launched.master, secret, allow_unauthenticated)
    hosts = ranks.exchange_bytes(
        launched.rank,
        launched.names,
        own_host.encode(),
        secret=secret,
        timeout=timeout,
        allow_unauthenticated=allow_unauthenticated,
    )
    port = addresses_lib.split(launched.master)[1]
    addresses = [
        addresses_lib.join(host.decode(), port + rank)
        for rank, host in enumerate(hosts)
    ]
    jobs = {cluster.job: addresses}
    known = resolvers.SimpleClusterResolver(
        tf.train.ClusterSpec(jobs), task_type=cluster.job, task_id=cluster.index
    )
    return known, dataclasses.replace(cluster, jobs=jobs)


def _ask_store(launched: Launched, timeout: float) -> Launched:
    """Gets the host of rank 0, which rank 0 stores in horovodrun's store."""
    store = addresses_lib.split(launched.store)
    if launched.rank == 0:
        host = _source_address(launched.store, timeout)
        put_text(store, host)
    else:
        host = get_text(store, timeout)
    port = addresses_lib.split(launched.master)[1]
    return dataclasses.replace(launched, master=addresses_lib.join(host, port))


def _own_host(launched: Launched, timeout: float) -> str:
    """Numeric address of this host from which rank 0 is reached."""
    if launched.rank != 0:
        return _source_address(launched.master, timeout)
    numeric = addresses_lib.bind_address(launched.master)
    _check_first(launched, numeric)
    return numeric


def _source_address(address: str, timeout: float) -> str:
    """Numeric address of this host from which an address is reached.

    Args:
        address: "host:port".
        timeout: seconds to wait until the host's name can be resolved.

    Raises:
        ValueError: the name cannot be resolved.
    """
    began = time.monotonic()
    while True:
        try:
            numeric = addresses_lib.bind_address(address)
            break
        except ValueError:
            left = began + timeout - time.monotonic()
            if left <= 0:
                raise
            time.sleep(min(left, connector.pause(timeout - left)))
    port = addresses_lib.split(address)[1]
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((numeric, port))  # This sends no packet.
        return str(probe.getsockname()[0])


def _check_first(launched: Launched, numeric: str) -> None:
    """Rejects an address at which the other ranks cannot reach rank 0."""
    remedy = (
        "Set MASTER_ADDR, for all ranks, to the address by which the others "
        "reach the host of rank 0."
    )
    host = addresses_lib.split(launched.master)[0]
    named_so = host in (numeric, "localhost")
    alone = launched.local_size == launched.size
    if addresses_lib.is_loopback(numeric) and not (named_so or alone):
        raise ValueError(
            f"Rank 0 of {launched.launcher} runs on {host!r}, which resolves "
            f"to {numeric} there: only processes of this host could reach it. "
            f"{remedy}"
        )
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((numeric, 0))
    except OSError as error:
        raise ValueError(
            f"Rank 0 of {launched.launcher} must listen at "
            f"{launched.master!r}, but {numeric} is not an address of its "
            f"host: {error}. {remedy}"
        ) from error


_REMEDY = (
    "Its library must be built for the TensorFlow that is installed: "
    "build_ops/horovod.sh PYTHON does it"
)


def start_horovod(collectives: Collectives) -> None:
    """Lets Horovod send the data of exchanges; all ranks must call this.

    Args:
        collectives: collectives of several connected ranks.

    Raises:
        ImportError: Horovod's library cannot be loaded on this rank.
        RuntimeError: Horovod's ranks are not the ranks of the strategy.
        tf.errors.AbortedError: another rank raised one of these errors.
    """
    group = collectives.group
    with collectives.joint_call(
        "load Horovod", end_barrier=True, own_error_first=True
    ):
        hvd = _load()
    with collectives.joint_call(
        "start Horovod", end_barrier=True, own_error_first=True
    ):
        hvd.init()
        if (hvd.rank(), hvd.size()) != (group.rank, group.world_size):
            raise RuntimeError(
                f"engine='horovod': this is rank {group.rank} of "
                f"{group.world_size}, but Horovod has rank {hvd.rank()} of "
                f"{hvd.size()}. Horovod supports ranks that horovodrun has "
                "started, or mpirun if it is built with MPI. Start the "
                "program by one of them, or leave `engine` out."
            )
    collectives.ops = HorovodOps(hvd)


def _load() -> ModuleType:
    try:
        return importlib.import_module("horovod.tensorflow")
    except Exception as error:  # Also an error of TensorFlow while it loads.
        raise ImportError(
            f"engine='horovod' needs Horovod, which cannot be imported: "
            f"{type(error).__name__}: {error}. {_REMEDY}."
        ) from error


def share_seeds(collectives: Collectives) -> None:
    """Gives all ranks the seed and the generators' states of rank 0.

    A rank that has called `tf.random.set_seed` keeps its seed. Python's and
    NumPy's generators do not record whether they were seeded, so the other
    ranks take the states of rank 0. This changes nothing if all ranks have
    set the same seeds.
    """
    first = collectives.group.rank == 0
    mine: JsonObject = {"seed": internals.global_seed()}
    if first:
        if mine["seed"] is None:
            # The seed, and what is derived from it, must not be guessable.
            mine["seed"] = secrets.randbits(128)
        mine["python"] = random.getstate()
        mine["numpy"] = _numpy_state()
    text = json.dumps(mine) + "\n"
    gathered = collectives.all_gather(
        tf.constant(np.frombuffer(text.encode(), np.uint8)), "seeds"
    )
    ranks = [
        json.loads(line) for line in gathered.numpy().tobytes().splitlines()
    ]
    if not first:
        version, words, gauss = ranks[0]["python"]
        random.setstate((version, tuple(words), gauss))
        if ranks[0]["numpy"]["bit_generator"] == _bit_generator():
            np.random.set_state(ranks[0]["numpy"])
    if internals.global_seed() is None:
        tf.random.set_seed(ranks[0]["seed"])
    _warn_if_they_differ([rank["seed"] for rank in ranks])


def _bit_generator() -> str:
    return str(np.random.get_state(legacy=False)["bit_generator"])


def _numpy_state() -> JsonObject:
    """State of NumPy's global generator in types that JSON can represent."""
    state: Any = np.random.get_state(legacy=False)
    inner = {
        field: value.tolist() if isinstance(value, np.ndarray) else value
        for field, value in state["state"].items()
    }
    return {**state, "state": inner}


def _warn_if_they_differ(seeds: list[int | None]) -> None:
    if any(seed not in (None, seeds[0]) for seed in seeds):
        tf.get_logger().warning(
            "The ranks use different seeds (%s), so they shuffle datasets "
            "differently and some samples are trained twice, others never. "
            "Call tf.random.set_seed with the same seed on every rank.",
            seeds,
        )
