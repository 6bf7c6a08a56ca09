# SPDX-License-Identifier: Apache-2.0
"""Messages of a Kafka topic, read with confluent-kafka."""

from __future__ import annotations

import collections
import importlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext.data.feeds import PlannedSource
from tfdist_ext.data.plans import Offsets
from tfdist_ext.data.plans import Range

# Longest wait for an answer of a broker, and for messages that it has.
_SECONDS = 60.0
# How often partitions are listed.
_LIST_SECONDS = 30.0
# Messages that are taken from the client at a time, and the wait for the first.
_MESSAGES = 1000
_POLL_SECONDS = 0.1
# Messages of other ranks that are received and dropped, rather than fetched
# anew behind them.
_MOST_SKIPPED = 10_000
# Messages of a partition that wait for a plan with them. The oldest of more are
# of plans of other ranks.
_MOST_WAITING = 50_000
_OWN = {
    "auto.offset.reset": "error",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
}


class KafkaSource(PlannedSource):
    """The messages of a topic.

    Args:
        topic: name of the topic.
        config: options of librdkafka.
        start: "earliest" or "latest".

    Attributes:
        kind: kind of the stream, in its state.
        spec: spec of a batch.

    Raises:
        ValueError: `start` or `config` is refused.
        ModuleNotFoundError: confluent-kafka is missing.
    """

    kind = "kafka"
    spec = tf.TensorSpec([None], tf.string)

    def __init__(self, topic: str, config: dict[str, Any], start: str) -> None:
        if start not in ("earliest", "latest"):
            raise ValueError(
                "Argument `start` of from_kafka must be 'earliest' or "
                f"'latest'. Received: start={start!r}"
            )
        refused = sorted(_OWN.keys() & config.keys())
        if refused:
            raise ValueError(
                f"The stream sets {', '.join(refused)} itself, as its position "
                "says where to read. Leave them out of `config`."
            )
        try:
            self._kafka: Any = importlib.import_module("confluent_kafka")
            self._admin: Any = importlib.import_module("confluent_kafka.admin")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "from_kafka needs confluent-kafka: pip install confluent-kafka"
            ) from error
        self._topic = topic
        # The client wants a group, though nothing is committed.
        self._config = {"group.id": "tfdist_ext", **config, **_OWN}
        self._brokers = dict(config)
        self._start = start
        self._client: Any = None
        self._reader: _Reader | None = None
        self._partitions: list[int] = []
        self._listed = -_LIST_SECONDS
        self._ends: dict[int, int] = {}

    def initial(self) -> Offsets:
        """The position before the first record."""
        return {}

    def to_json(self, offsets: Offsets) -> Any:
        """Offsets as JSON values."""
        return {"topic": self._topic, "offsets": offsets}

    def from_json(self, value: Any) -> Offsets:
        """The offsets that `to_json` was called with.

        Raises:
            ValueError: they are of another topic.
        """
        if value["topic"] != self._topic:
            raise ValueError(
                f"The position is that of topic '{value['topic']}', and this "
                f"stream reads '{self._topic}'."
            )
        return dict(value["offsets"])

    def available(
        self, offsets: Offsets, most: int, after: str
    ) -> list[tuple[str, np.ndarray]]:
        """See `Source.available`."""
        begun = self._list_partitions(offsets)
        if begun:
            return begun
        left = self._left(offsets)
        if sum(left.values()) < most:
            self._ends = self._offsets("latest", self._partitions)
            self._check(offsets)
            left = self._left(offsets)
        found: list[tuple[str, np.ndarray]] = []
        # Equal shares, and what a short partition lacks goes to the next one.
        for index, (partition, size) in enumerate(left.items()):
            share = min(size, -(-most // (len(left) - index)))
            most -= share
            if share:
                first = offsets[str(partition)]
                ends = np.arange(first, first + share + 1)
                found.append((str(partition), ends))
        return found

    def _left(self, offsets: Offsets) -> dict[int, int]:
        """Messages after the offsets, by partition; all that are known."""
        ends = self._ends
        return {
            p: max(0, ends.get(p, 0) - offsets[str(p)])
            for p in self._partitions
        }

    def _check(self, offsets: Offsets) -> None:
        for partition, end in self._ends.items():
            at = offsets[str(partition)]
            if at > end:
                raise RuntimeError(
                    f"Topic '{self._topic}', partition {partition}, ends at "
                    f"offset {end}, but offsets up to {at} were read: the "
                    "topic was made anew. Begin without the old position."
                )

    def _list_partitions(
        self, offsets: Offsets
    ) -> list[tuple[str, np.ndarray]]:
        """Lists partitions; returns where new ones begin."""
        now = time.monotonic()
        if now - self._listed >= _LIST_SECONDS:
            if self._client is None:
                self._client = self._admin.AdminClient(self._brokers)
            topics = self._client.list_topics(self._topic, _SECONDS).topics
            topic = topics[self._topic]
            if topic.error is not None:
                raise RuntimeError(
                    f"Topic '{self._topic}' cannot be read: {topic.error}"
                )
            self._partitions = sorted(topic.partitions)
            self._listed = now
        new = [p for p in self._partitions if str(p) not in offsets]
        if not new:
            return []
        # Of a partition that was added, no message is left out.
        where = "earliest" if offsets else self._start
        return [
            (str(partition), np.array([first]))
            for partition, first in self._offsets(where, new).items()
        ]

    def _offsets(self, where: str, partitions: Sequence[int]) -> dict[int, int]:
        """Offsets of the first messages, or after the last ones."""
        spec = getattr(self._admin.OffsetSpec, where)()
        level = self._config.get("isolation.level", "read_committed").upper()
        kind = self._kafka.TopicPartition
        answers = self._client.list_offsets(
            {kind(self._topic, partition): spec for partition in partitions},
            isolation_level=self._kafka.IsolationLevel[level],
            request_timeout=_SECONDS,
        )
        return {
            each.partition: answer.result().offset
            for each, answer in answers.items()
        }

    def read(self, ranges: Sequence[Range]) -> Any:
        """See `Source.read`."""
        values: list[bytes] = []
        if self._reader is None:
            self._reader = _Reader(self._kafka, self._topic, self._config)
        for part, start, stop, size in ranges:
            if size:
                values += self._reader.read(int(part), start, stop)
        return np.array(values, object)


class _Reader:
    """Reads ranges of partitions.

    Args:
        kafka: the module `confluent_kafka`.
        topic: name of the topic.
        config: options of the consumer.
    """

    def __init__(self, kafka: Any, topic: str, config: dict[str, Any]) -> None:
        self._kafka = kafka
        self._topic = topic
        self._consumer = kafka.Consumer(config)
        # By partition: the offset up to which ranges were read, that of the
        # next message of the consumer, and the messages between.
        self._read: dict[int, int] = {}
        self._next: dict[int, int] = {}
        self._waiting: dict[int, collections.deque[tuple[int, bytes]]] = {}
        self._lock = threading.Lock()

    def read(self, partition: int, start: int, stop: int) -> list[bytes]:
        """Reads the messages of a partition with offsets in a range.

        Offsets may be missing, where a topic is compacted or has transactions.

        Args:
            partition: number of the partition.
            start: first offset.
            stop: offset after the last one.

        Returns:
            Values of the messages, b"" for those without a value.

        Raises:
            RuntimeError: the broker does not have them.
        """
        with self._lock:
            self._go_to(partition, start)
            waiting = self._waiting[partition]
            values: list[bytes] = []
            deadline = time.monotonic() + _SECONDS
            while True:
                while waiting and waiting[0][0] < stop:
                    offset, value = waiting.popleft()
                    if offset >= start:
                        values.append(value)
                if waiting or self._next[partition] >= stop:
                    break
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Topic '{self._topic}', partition {partition}: no "
                        f"message of offsets {start} to {stop - 1} came within "
                        f"{_SECONDS:g} s. Are its brokers reachable?"
                    )
                self._receive()
            self._read[partition] = stop
            return values

    def _go_to(self, partition: int, start: int) -> None:
        """Makes the consumer read a partition at an offset."""
        known = partition in self._read
        if (
            known
            and self._read[partition] <= start
            and start - self._next[partition] <= _MOST_SKIPPED
        ):
            return
        place = self._kafka.TopicPartition(self._topic, partition, start)
        if known:
            self._consumer.incremental_unassign([place])
        self._consumer.incremental_assign([place])
        self._read[partition] = self._next[partition] = start
        self._waiting[partition] = collections.deque()

    def _receive(self) -> None:
        """Takes the messages that have come, of all partitions."""
        messages = self._consumer.consume(_MESSAGES, 0)
        if not messages:
            message = self._consumer.poll(_POLL_SECONDS)
            messages = [message] if message is not None else []
        for message in messages:
            partition, offset = message.partition(), message.offset()
            error = message.error()
            if error is None:
                self._next[partition] = offset + 1
                value = message.value() or b""
                self._waiting[partition].append((offset, value))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                self._next[partition] = offset
            else:
                raise RuntimeError(
                    f"Topic '{self._topic}', partition {partition}: "
                    f"{error.str()}. If messages were deleted before they were "
                    "trained, they are lost: keep them longer "
                    "(`retention.ms`), and set the position after them."
                )
        for partition, waiting in self._waiting.items():
            if len(waiting) > _MOST_WAITING and partition in self._read:
                place = self._kafka.TopicPartition(self._topic, partition)
                self._consumer.incremental_unassign([place])
                waiting.clear()
                del self._read[partition], self._next[partition]
