# SPDX-License-Identifier: Apache-2.0
"""Metrics in one process: configurations, kinds of input, refusals."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import metrics

keras = tf.keras

MADE = [
    metrics.NormalizedEntropy(from_logits=True, window=3),
    metrics.Calibration(window=2, name="ratio"),
    metrics.ExpectedCalibrationError(7),
    metrics.GAUC(9, "positives", window=4),
    metrics.BucketedGAUC(3, 8, "groups", from_logits=True),
    metrics.RecallAtK(3, padding=0),
    metrics.HitAtK(5, padding="", window=1),
    metrics.MRRAtK(),
    metrics.NDCGAtK(4, name="own"),
    metrics.ItemCoverageAtK(30, 3, window=2),
]


@pytest.mark.parametrize("metric", MADE, ids=lambda m: type(m).__name__)
def test_configurations_make_the_same_metric(metric):
    config = keras.metrics.serialize(metric)
    again = keras.metrics.deserialize(config)
    assert type(again) is type(metric)
    assert again.get_config() == metric.get_config()
    shapes = [v.shape for v in again.variables]
    assert shapes == [v.shape for v in metric.variables]
    assert set(metrics.__all__) == {type(each).__name__ for each in MADE}


def test_names_have_k():
    assert metrics.NDCGAtK(7).name == "ndcg_at_7"
    assert metrics.HitAtK(name="own").name == "own"


def test_logits():
    logits = np.array([-2.0, 0.5, 3.0, -0.1])
    labels = [0, 1, 1, 0]
    for kind in (metrics.NormalizedEntropy, metrics.ExpectedCalibrationError):
        of_logits, plain = kind(from_logits=True), kind()
        of_logits.update_state(labels, logits)
        plain.update_state(labels, 1 / (1 + np.exp(-logits)))
        assert float(of_logits.result()) == pytest.approx(float(plain.result()))


def test_certain_predictions_are_finite():
    metric = metrics.NormalizedEntropy()
    metric.update_state([1, 0], [0.0, 1.0])
    found = float(metric.result())
    assert found == pytest.approx(np.log(1e12) / np.log(2), rel=1e-4)


def test_sums_do_not_lose_small_batches():
    """A float32 that has counted 2^25 samples does not count one more."""
    metric = metrics.Calibration(dtype="float64")
    metric.update_state([1.0], [1.0], sample_weight=[2.0**25])
    for _ in range(8):
        metric.update_state([1.0], [0.0])
    assert float(metric.result()) == 2.0**25 / (2.0**25 + 8)


@pytest.mark.parametrize(
    "relevant",
    [
        tf.ragged.constant([["a"], [], ["b", "c"]]),
        tf.constant([["a", ""], ["", ""], ["b", "c"]]),
    ],
    ids=["ragged", "padded"],
)
def test_strings(relevant):
    metric = metrics.RecallAtK(2, padding="")
    metric.update_state(relevant, [["a", "x"], ["b", "x"], ["y", "c"]])
    assert float(metric.result()) == 0.75


def test_before_the_first_sample():
    for metric in MADE:
        metric.reset_state()
        assert float(metric.result()) == 0.0


def test_a_bucket_loses_the_order_within():
    """By half of a group's pairs at most, as the documentation says."""
    labels, chances = [1, 0, 1, 0], [0.26, 0.25, 0.6, 0.1]
    exact = metrics.GAUC(4)
    coarse = metrics.BucketedGAUC(1, num_buckets=10)
    for metric in (exact, coarse):
        metric.update_state(labels, chances, groups=[0] * 4)
    assert float(exact.result()) == 1.0
    assert float(coarse.result()) == 1.0 - 0.5 / 4


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: metrics.NDCGAtK(0), r"`k`.*k=0.*'ndcg_at_0'"),
        (lambda: metrics.Calibration(window=0), "`window`.*window=0"),
        (lambda: metrics.Calibration(window=True), "`window`.*True"),
        (lambda: metrics.GAUC(5, "users"), "`weighting`.*'users'.*'gauc'"),
        (lambda: metrics.GAUC(0), "`max_samples`.*'gauc'"),
        (lambda: metrics.ItemCoverageAtK(0.5), "`num_items`.*0.5"),
        (lambda: metrics.BucketedGAUC(2, 1), "`num_buckets`.*at least 2"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_too_few_items_are_refused():
    with pytest.raises(ValueError, match=r"'recall_at_5'.*ShardedTopK\(k=5\)"):
        metrics.RecallAtK(5).update_state([1], [[1, 2, 3]])


def test_unknown_groups_are_refused():
    metric = metrics.BucketedGAUC(3)
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"groups in \[0, 3\)"
    ):
        metric.update_state([1], [0.5], groups=[3])
