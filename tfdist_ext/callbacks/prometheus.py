# SPDX-License-Identifier: Apache-2.0
"""The callback that serves a training's numbers to Prometheus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.callbacks.update_watch import collectives_of
from tfdist_ext.comm.process_group import ProcessGroup
from tfdist_ext.type_names import Logs

keras = tf.keras

# Name, type, labels beside `rank`, and meaning of what is served.
METRICS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "tfdist_steps": ("counter", (), "Steps of training."),
    "tfdist_epochs": ("counter", (), "Epochs that have ended."),
    "tfdist_log": (
        "gauge",
        ("name",),
        "Losses and metrics of Keras's logs, of the running epoch; those of "
        "validation (val_*) of the last one.",
    ),
    "tfdist_learning_rate": ("gauge", (), "Learning rate of the optimizer."),
    "tfdist_exchange_calls": (
        "counter",
        ("label",),
        "Exchanges with other ranks, by label.",
    ),
    "tfdist_exchange_sent_bytes": (
        "counter",
        ("label",),
        "Bytes that exchanges have sent, by label.",
    ),
    "tfdist_exchange_seconds": (
        "counter",
        ("label",),
        "Seconds in exchanges, by label, with the time of waiting.",
    ),
    "tfdist_sent_bytes": ("counter", (), "Bytes sent to all ranks."),
    "tfdist_received_bytes": (
        "counter",
        (),
        "Bytes received from all ranks.",
    ),
    "tfdist_waited_seconds": (
        "counter",
        ("for_rank",),
        "Seconds that exchanges waited, by the rank that came last.",
    ),
    "tfdist_batch_share": ("gauge", (), "Share of this rank in a batch."),
    "tfdist_stale_updates": (
        "counter",
        ("steps_old",),
        "Updates of rows and variables of this rank, by how many steps old "
        "the values were that they were computed from (SSP and BAP).",
    ),
    "tfdist_held_back_ratio": (
        "gauge",
        ("of",),
        "Share of dense gradients and of rows that ASP holds back.",
    ),
    "tfdist_resident_memory_bytes": (
        "gauge",
        (),
        "Memory that this process uses.",
    ),
}
_HELD = {"dense_held_back": "dense", "rows_held_back": "rows"}


class Prometheus(keras.callbacks.Callback):  # type: ignore[name-defined]
    """Serves the numbers of `fit` to Prometheus, on every rank.

    Every rank is a process of its own and has its own endpoint,
    `http://ADDRESS:PORT/metrics`. The port is `port` plus the number of the
    rank among those of its host, so that four ranks of a host have the ports
    9470 to 9473. The endpoint starts with the first `fit`, and ends with the
    process or by `close`. Numbers are collected when Prometheus asks; a step
    only copies its logs.

        model.fit(data, callbacks=[tfdist_ext.callbacks.Prometheus()])

    docs/monitoring.md has the names and a dashboard for Grafana.

    Attributes:
        port: the port of this rank's endpoint, once it has started.

    Args:
        port: port of the first rank of each host. 0 takes any free port.
        address: address to listen on. The default is reached from this host
            only. "0.0.0.0" is reached from the network, by anyone: the
            endpoint has no authentication.

    Raises:
        ImportError: the package `prometheus_client` is not installed.
        ValueError: the port is not one, or too large for the ranks of a host.
        OSError: from `fit`, if the port is in use.
    """

    def __init__(self, port: int = 9470, address: str = "127.0.0.1") -> None:
        super().__init__()
        self._library = _library()
        if isinstance(port, bool) or not isinstance(port, int):
            raise ValueError(
                "Argument `port` of Prometheus must be an integer. Received: "
                f"port={port!r}."
            )
        if not 0 <= port < 1 << 16:
            raise ValueError(
                "Argument `port` of Prometheus must be from 0 to 65535. "
                f"Received: port={port}."
            )
        self._address, self._base, self.port = address, port, port
        self._server: Any = None
        self._steps = self._epochs = self._batch = 0
        self._logs: dict[str, float] = {}

    def on_train_begin(self, logs: Logs = None) -> None:
        if self._server is not None:
            return
        group = _group_of(self.model)
        self.port = self._base + (_local_rank(group) if self._base else 0)
        if self.port >= 1 << 16:
            raise ValueError(
                f"Argument `port` of Prometheus is {self._base}, and this rank "
                f"would have port {self.port}. Give a smaller one."
            )
        registry = self._library.CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = self._library.start_http_server(
                self.port, self._address, registry=registry
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"Prometheus cannot listen on {self._address}:{self.port} "
                f"(port {self._base} plus the number of the rank on this "
                f"host): {error.strerror}. Give another `port`, or call "
                "close() of the callback that has it.",
            ) from error
        self.port = self._server.server_port

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._batch = 0

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        # A call may stand for several steps (`steps_per_execution`).
        self._steps += batch + 1 - self._batch
        self._batch = batch + 1
        self._keep(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._epochs += 1
        self._keep(logs)

    def _keep(self, logs: Logs) -> None:
        self._logs = self._logs | {
            name: float(value)
            for name, value in (logs or {}).items()
            if np.ndim(value) == 0
        }

    def close(self) -> None:
        """Ends the endpoint; the next `fit` starts it again."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def describe(self) -> Iterator[Any]:
        """Yields the metrics without values, for the registry."""
        for name in METRICS:
            yield self._family(name)

    def collect(self) -> Iterator[Any]:
        """Yields the metrics with values, when Prometheus asks."""
        group = _group_of(self.model)
        rank = "0" if group is None else str(group.rank)
        found = self._own() | _of_strategy(self.model)
        for name, values in found.items():
            family = self._family(name)
            for labels, value in values.items():
                family.add_metric([rank, *labels], value)
            yield family

    def _family(self, name: str) -> Any:
        kind, labels, meaning = METRICS[name]
        metrics = self._library.core
        make = {
            "counter": metrics.CounterMetricFamily,
            "gauge": metrics.GaugeMetricFamily,
        }[kind]
        return make(name, meaning, labels=["rank", *labels])

    def _own(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "tfdist_steps": {(): self._steps},
            "tfdist_epochs": {(): self._epochs},
            "tfdist_log": {(k,): v for k, v in self._logs.items()},
            "tfdist_resident_memory_bytes": {(): _memory()},
        }
        rate = getattr(self.model.optimizer, "learning_rate", None)
        if callable(rate) and not isinstance(rate, tf.Variable):
            rate = rate(self.model.optimizer.iterations)
        if rate is not None:
            found["tfdist_learning_rate"] = {
                (): float(tf.convert_to_tensor(rate))
            }
        return found


def _library() -> Any:
    try:
        import prometheus_client.core
    except ImportError as error:
        raise ImportError(
            "callbacks.Prometheus needs the package prometheus_client: "
            "pip install prometheus_client"
        ) from error
    return prometheus_client


def _group_of(model: Any) -> ProcessGroup | None:
    collectives = collectives_of(model)
    return None if collectives is None else collectives.group


def _local_rank(group: ProcessGroup | None) -> int:
    """The number of a rank among those of its host."""
    if group is None or group.world_size == 1:
        return 0
    hosts = [each.rpartition(":")[0] for each in group.addresses]
    return hosts[: group.rank].count(hosts[group.rank])


def _memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _of_strategy(model: Any) -> dict[str, Any]:
    statistics: dict[str, Any] = getattr(
        model.distribute_strategy, "statistics", dict
    )()
    if not statistics:
        return {}
    found: dict[str, Any] = {
        "tfdist_exchange_calls": {},
        "tfdist_exchange_sent_bytes": {},
        "tfdist_exchange_seconds": {},
        "tfdist_sent_bytes": {(): statistics["bytes_sent"]},
        "tfdist_received_bytes": {(): statistics["bytes_received"]},
        "tfdist_waited_seconds": {
            (str(i),): value for i, value in enumerate(statistics["waited"])
        },
    }
    for label, (calls, sent, seconds) in statistics["labels"].items():
        found["tfdist_exchange_calls"][label,] = calls
        found["tfdist_exchange_sent_bytes"][label,] = sent
        found["tfdist_exchange_seconds"][label,] = seconds
    shares = statistics["shares"]
    rank = model.distribute_strategy.rank
    if rank < len(shares):
        found["tfdist_batch_share"] = {(): shares[rank]}
    if "staleness" in statistics:
        found["tfdist_stale_updates"] = {
            (str(steps),): count
            for steps, count in statistics["staleness"].items()
        }
    held = {
        (of,): statistics[name]
        for name, of in _HELD.items()
        if name in statistics
    }
    return found | ({"tfdist_held_back_ratio": held} if held else {})
