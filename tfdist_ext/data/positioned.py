# SPDX-License-Identifier: Apache-2.0
"""Streams of records whose position is saved in checkpoints."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_ext.data.feeds import Reading
from tfdist_ext.data.files import FileSource
from tfdist_ext.data.generators import GeneratorSource
from tfdist_ext.data.kafka import KafkaSource
from tfdist_ext.type_names import Nest


class PositionedDataset(tf.train.experimental.PythonState):
    """A stream of records with a position that checkpoints keep.

        stream = PositionedDataset.from_files("clicks/*.tfrecord")
        data = stream.batches(512, wait=3600.0).map(parse)
        model.fit(data, callbacks=[Resume("run1", every=1000)])

    The position is where the last trained batch of all ranks ends. `Resume`
    saves and restores it, and so does `tf.train.Checkpoint(stream=stream)`.
    After any fault, and at another number of ranks too, training continues from
    the last checkpoint: the model was trained once with every record before the
    checkpoint's position, and with none after it.

    Each iterator of `fit`, or of a dataset that
    `strategy.experimental_distribute_dataset` returns, begins at the position
    and moves it; the iterator before is over. Other iterators begin at the
    position too, and do not move it.

    Make a stream by `from_files`, `from_kafka` or `from_generator`. Every rank
    makes it with the same arguments.

    Args:
        source: what one of these methods has made.
    """

    def __init__(self, source: FileSource | KafkaSource | GeneratorSource):
        super().__init__()
        self._source = source
        self._reading: Reading | None = None
        self._invited: Reading | None = None
        self._number = 0
        # Offsets by file or partition, or the state of the generator.
        self.offsets: Any = source.initial()

    @classmethod
    def from_files(
        cls,
        pattern: str | os.PathLike[str],
        file_format: str | None = None,
        header: bool = False,
    ) -> PositionedDataset:
        """A stream of the records of files that grow, or are added.

        Files are read in the order of their names, each to its last whole
        record. Then all of them are searched for new records again. Names that
        begin with "." or "_" are left out.

        Args:
            pattern: a folder, or a glob pattern such as "clicks/*.csv", in a
                file system that all ranks see.
            file_format: "tfrecord", "csv" or "parquet"; None to tell by the
                names. TFRecord must not be compressed. A record of CSV is a
                line. Files of Parquet do not grow: rename them into place. They
                need `pip install pyarrow`.
            header: whether the first line of every CSV file is left out.

        Returns:
            The stream. A batch is strings `[n]`, the serialized records or the
            lines. A batch of Parquet is a dict of columns `[n]`; lists are
            RaggedTensors.

        Raises:
            ValueError: the format is unknown.
            ModuleNotFoundError: pyarrow is missing.
        """
        return cls(FileSource(os.fspath(pattern), file_format, header))

    @classmethod
    def from_kafka(
        cls, topic: str, config: dict[str, Any], start: str = "earliest"
    ) -> PositionedDataset:
        """A stream of the messages of a Kafka topic.

        The position of the checkpoint counts: no offset is committed to Kafka.
        Partitions may be added. This needs `pip install confluent-kafka`.

        Args:
            topic: name of the topic.
            config: options of librdkafka, such as "bootstrap.servers".
            start: "earliest" or "latest": where the partitions begin that are
                there before the first record was read. Partitions that are
                added later begin at their first message.

        Returns:
            The stream. A batch is strings `[n]`, the values of messages.

        Raises:
            ValueError: `start` is another value, or the stream itself sets an
                option of `config`.
            ModuleNotFoundError: confluent-kafka is missing.
        """
        return cls(KafkaSource(topic, config, start))

    @classmethod
    def from_generator(
        cls, generator: Any, output_signature: Nest = None
    ) -> PositionedDataset:
        """A stream of the batches of an iterator that has a state.

        All ranks read the same batches, and each trains its slice.

        Args:
            generator: an object whose `__next__` returns global batches, with
                `get_state()` and `set_state(state)`, such as an iterator of
                Grain. A state is bytes, or consists of JSON values.
            output_signature: nest of `tf.TensorSpec` of a batch; None to read
                it off the first batch, after which the state is set back.

        Returns:
            The stream.

        Raises:
            ValueError: the generator lacks one of these methods.
        """
        return cls(GeneratorSource(generator, output_signature))

    def batches(
        self,
        batch_size: int | None = None,
        wait: float = 0.0,
        linger: float = 1.0,
    ) -> tf.data.Dataset:
        """The records that follow the position, in batches.

        `map`, `prefetch` and `with_options` may follow. `fit` refuses other
        transformations, after which a batch would not tell its records.

        Args:
            batch_size: records of a batch of all ranks; None for a generator,
                which makes batches.
            wait: seconds without a new record after which the dataset ends: 0
                to end when all present records are read, `math.inf` to never
                end.
            linger: seconds that a batch waits for more records once it has one.
                Then it is smaller.

        Returns:
            The dataset. In `fit` a rank reads only its records of each batch,
            which may be none.

        Raises:
            ValueError: an argument is out of range, or there is no Parquet file
                to read the columns off.
        """
        feed = self._source.feed(self, batch_size, wait=wait, linger=linger)
        return feed.dataset(self._source.spec)

    def get_state(self) -> dict[str, Any]:
        """The position after the last trained batch, as JSON values."""
        return {
            "kind": self._source.kind,
            **self._source.to_json(self.offsets),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Sets the position; iterators that have begun are over.

        Args:
            state: result of `get_state`.

        Raises:
            ValueError: it is the state of another kind of stream.
        """
        kind = self._source.kind
        if state.get("kind") != kind:
            raise ValueError(
                f"The position is that of a stream of {state.get('kind')}, and "
                f"this stream reads {kind}. Restore it with the stream that "
                "was saved."
            )
        self.offsets = self._source.from_json(state)
        self._reading = self._invited = None

    def serialize(self) -> str:
        """The position as text, for `tf.train.Checkpoint`."""
        return json.dumps(self.get_state())

    def deserialize(self, string_value: bytes | str) -> None:
        """Sets the position from the text of `serialize`."""
        self.set_state(json.loads(tf.compat.as_text(string_value)))

    def begin(self, make: Callable[[int], Reading]) -> int:
        """Begins an iterator that moves the position.

        Args:
            make: makes the reading of an iterator from its number.

        Returns:
            The number of the iterator.
        """
        self._number += 1
        self._reading = self._invited = make(self._number)
        return self._number

    def invited(self) -> Reading | None:
        """The reading that a new generator is for; None for the program's."""
        reading, self._invited = self._invited, None
        return reading

    @property
    def current(self) -> Any:
        """The reading of the last iterator; None before."""
        return self._reading

    def is_current(self, reading: Reading) -> bool:
        """Whether a reading is that of the last iterator."""
        return reading is self._reading

    def reading_of(self, number: int) -> Any:
        """The reading of an iterator.

        Args:
            number: number of the iterator.

        Raises:
            RuntimeError: another iterator has begun, or the position was set.
        """
        if self._reading is None or self._reading.number != number:
            raise RuntimeError(
                "An iterator of a PositionedDataset was read after another one "
                "had begun, or after the position was set. A stream has one "
                "position: read one iterator at a time, and make another "
                "PositionedDataset for evaluation."
            )
        return self._reading

    def move_to(self, state: Any) -> None:
        """Sets the state of the generator after a trained batch."""
        self.offsets = state
