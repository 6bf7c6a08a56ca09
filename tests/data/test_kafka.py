# SPDX-License-Identifier: Apache-2.0
"""Messages of Kafka, from the broker in the client library's own mock.

librdkafka has a broker of its own for tests ("test.mock.num.brokers"). It
speaks Kafka's protocol over TCP, but it is not Kafka's server.
"""

import itertools
import threading

import pytest
import tensorflow as tf

import tfdist_ext
from tfdist_ext.data import PositionedDataset

kafka = pytest.importorskip("confluent_kafka")
PARTITIONS = 4  # of every topic of the mock


@pytest.fixture(scope="module")
def strategy():
    return tfdist_ext.HybridParallelStrategy()


@pytest.fixture(scope="module")
def producer():
    return kafka.Producer(
        {"test.mock.num.brokers": 1, "client.id": "mock", "log_level": 0}
    )


@pytest.fixture(scope="module")
def brokers(producer):
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    return {
        "bootstrap.servers": f"{broker.host}:{broker.port}",
        "log_level": 0,
    }


def produce(producer, topic, ids, partitions=PARTITIONS):
    for each in ids:
        producer.produce(topic, str(each), partition=each % partitions)
    assert producer.flush(30) == 0


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


def follow(strategy, stream, size, most=None, **options):
    data = strategy.experimental_distribute_dataset(
        stream.batches(size, **options)
    )
    found = itertools.islice(iter(data), most)
    return [batch.numpy().astype(int).tolist() for batch in found]


def test_every_message_counts_once(strategy, producer, brokers):
    produce(producer, "clicks", range(100))
    stream = PositionedDataset.from_kafka("clicks", brokers)
    # Equal shares of the partitions.
    first = follow(strategy, stream, 20, 2)
    assert sorted(first[0]) == list(range(20))
    state = stream.get_state()
    assert state["topic"] == "clicks"
    assert set(state["offsets"].values()) == {10}
    # More come, to one partition; another process goes on at the position.
    produce(producer, "clicks", range(100, 130, 4))
    other = PositionedDataset.from_kafka("clicks", brokers)
    other.set_state(state)
    rest = follow(strategy, other, 30)
    assert sorted(flat(rest)) == [*range(40, 100), *range(100, 130, 4)]
    assert follow(strategy, other, 30) == []
    # Back to the position that was saved.
    other.set_state(state)
    assert sorted(flat(follow(strategy, other, 30))) == sorted(flat(rest))


def test_the_latest_messages(strategy, producer, brokers):
    produce(producer, "views", range(8))
    stream = PositionedDataset.from_kafka("views", brokers, start="latest")
    writer = threading.Timer(3, produce, [producer, "views", [8, 9]])
    writer.start()
    assert follow(strategy, stream, 2, 1, wait=60.0) == [[8, 9]]
    writer.join()
    # Where the others begin is known, though none of theirs was trained.
    state = stream.get_state()
    assert state["offsets"] == {"0": 3, "1": 3, "2": 2, "3": 2}
    other = PositionedDataset.from_kafka("views", brokers, start="latest")
    other.set_state(state)
    produce(producer, "views", [10, 11])
    assert flat(follow(strategy, other, 2)) == [10, 11]
    with pytest.raises(ValueError, match="position is that of topic 'views'"):
        PositionedDataset.from_kafka("other", brokers).set_state(state)


def test_wrong_arguments_are_named(brokers):
    with pytest.raises(ValueError, match="start='first'"):
        PositionedDataset.from_kafka("clicks", brokers, start="first")
    config = {**brokers, "auto.offset.reset": "latest"}
    with pytest.raises(ValueError, match=r"sets auto.offset.reset itself"):
        PositionedDataset.from_kafka("clicks", config)


def test_a_topic_that_was_made_anew_is_an_error(strategy, producer, brokers):
    produce(producer, "anew", range(8))
    stream = PositionedDataset.from_kafka("anew", brokers)
    offsets = {str(p): 3 for p in range(PARTITIONS)}
    stream.set_state({**stream.get_state(), "offsets": offsets})
    with pytest.raises(tf.errors.OpError, match=r"ends at offset 2, but .* 3"):
        follow(strategy, stream, 8)
