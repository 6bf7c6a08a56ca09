# SPDX-License-Identifier: Apache-2.0
"""Reader and generator of Criteo click logs."""

import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from data import criteo
from data import synthetic_criteo

BUCKETS = 2**40  # Wide enough that no two values of these tests meet.


def make_line(label: int = 1, **values: object) -> str:
    fields = [str(values.get(name, "")) for name in criteo.FIELDS]
    return "\t".join([str(label), *fields])


def parse(*lines: str, **options):
    return criteo.parse_lines(tf.constant(lines), BUCKETS, **options)


def id_of(token: str) -> int:
    return tf.strings.to_hash_bucket_fast(token, BUCKETS).numpy()


def test_every_field_is_an_id_of_its_name_and_value() -> None:
    features, labels = parse(make_line(1, I1=2, C1="68fd1e64"), make_line(0))
    ids = features["ids"].numpy()
    assert ids.shape == (2, 39)
    assert ids[0, 0] == id_of("I1=2")
    assert ids[0, 13] == id_of("C1=68fd1e64")
    assert ids[1].tolist() == [id_of(f"{name}=") for name in criteo.FIELDS]
    np.testing.assert_array_equal(labels, [[1.0], [0.0]])


@pytest.mark.parametrize(
    ("text", "number", "token"),
    [
        ("", 0.0, ""),
        ("0", 0.0, "0"),
        ("-3", 0.0, "-3"),
        ("2", math.log(3), "2"),
        ("3", math.log(4), "3"),
        ("100", math.log(101), "23"),
    ],
)
def test_integers(text: str, number: float, token: str) -> None:
    features, _ = parse(make_line(I5=text))
    assert features["ids"].numpy()[0, 4] == id_of(f"I5={token}")
    np.testing.assert_allclose(features["numbers"][0, 4], number, rtol=1e-6)


def test_crosses_are_further_ids() -> None:
    crosses = [("C1", "C2"), ("I1", "C2", "C3")]
    line = make_line(I1=1, C1="a", C2="b")
    features, _ = parse(line, crosses=crosses)
    ids = features["ids"].numpy()[0]
    assert ids.size == 41
    assert ids[39] == id_of("C1=a&C2=b")
    assert ids[40] == id_of("I1=1&C2=b&C3=")


def test_a_line_may_end_early() -> None:
    whole, _ = parse(make_line(I1=2))
    short, _ = parse(make_line(I1=2).rstrip("\t"))
    np.testing.assert_array_equal(whole["ids"], short["ids"])


@pytest.mark.parametrize(
    "line",
    [make_line() + "\t", make_line(I3="x"), make_line().replace("1", "", 1)],
    ids=["many fields", "no number", "no label"],
)
def test_bad_lines_are_errors(line: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError):
        parse(line)


def test_parts_are_disjoint_and_complete(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(make_line(C1=i) for i in range(2345)))

    def ids_of(batches: tf.data.Dataset) -> list[int]:
        parts = [features["ids"][:, 13] for features, _ in batches]
        return tf.concat(parts, 0).numpy().tolist()

    train = criteo.dataset([str(path)], 100, BUCKETS, validation=False)
    held_out = criteo.dataset([str(path)], 100, BUCKETS, validation=True)
    expected = [id_of(f"C1={i}") for i in range(2345)]
    assert ids_of(held_out) == expected[9::10]
    assert sorted(ids_of(train) + ids_of(held_out)) == sorted(expected)
    assert train.cardinality().numpy() == 22
    assert held_out.cardinality().numpy() == 3


def test_shuffled_order_is_the_seeds(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.tsv"
    path.write_text("\n".join(make_line(C1=i) for i in range(500)))

    def order(seed: int) -> list[list[int]]:
        batches = criteo.dataset(
            [str(path)], 50, BUCKETS, validation=False, shuffle=500, seed=seed
        )
        return [
            features["ids"][:, 13].numpy().tolist()
            for _ in range(2)
            for features, _ in batches
        ]

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    assert first[:9] != first[9:]  # Another order in the second epoch.


def test_generated_log_can_be_parsed() -> None:
    lines, clicks = zip(*synthetic_criteo.samples(3000), strict=True)
    features, labels = parse(*lines)
    assert features["ids"].shape == (3000, 39)
    assert abs(float(tf.reduce_mean(labels)) - np.mean(clicks)) < 0.03
    missing = np.isin(features["ids"][:, 13], id_of("C1="))
    assert abs(missing.mean() - synthetic_criteo.MISSING_CATEGORY) < 0.02


def test_generated_log_is_deterministic() -> None:
    first = list(synthetic_criteo.samples(50, seed=3))
    assert first == list(synthetic_criteo.samples(50, seed=3))
    assert first != list(synthetic_criteo.samples(50, seed=4))


def test_truth_of_generated_log_is_worth_learning() -> None:
    lines, clicks = zip(*synthetic_criteo.samples(20_000), strict=True)
    labels = [int(line[0]) for line in lines]
    auc = tf.keras.metrics.AUC()
    auc.update_state(labels, clicks)
    assert 0.78 < float(auc.result()) < 0.9


def test_real_log(real_data: Callable[[str], pathlib.Path]) -> None:
    path = real_data("criteo") / "train_sample.txt"
    batches = criteo.dataset([str(path)], 128, 1000, validation=False)
    samples = 0
    for features, labels in batches:
        samples += len(labels)
        assert tf.reduce_all(tf.math.is_finite(features["numbers"]))
        assert tf.reduce_min(features["ids"]) >= 0
        assert tf.reduce_max(features["ids"]) < 1000
    lines = path.read_text().splitlines()
    assert samples == len(lines) - len(lines) // 10
