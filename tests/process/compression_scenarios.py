# SPDX-License-Identifier: Apache-2.0
"""Dense gradients of which each step sends some values."""

import contextlib
import math
import warnings

import numpy as np
import tensorflow as tf
from check_scenarios import said
from fit_models import BATCH
from fit_models import ROWS
from fit_models import data
from fit_models import make_model
from fit_models import same_on_all_ranks
from fit_models import weights

import tfdist_ext
from tfdist_ext.compression import RandomK
from tfdist_ext.compression import TopK
from tfdist_ext.layers import FullSparse
from tfdist_ext.strategy import sparse_sums

keras = tf.keras
SIZES = (600, 400)  # of two variables in one bucket
SHARE = 0.1


@contextlib.contextmanager
def compressed(strategy, compression):
    """The strategy as if it had been created with a compression."""
    sums = sparse_sums.sums_of(compression, strategy.collectives)
    strategy.extended.sparse_sums = sums
    try:
        yield
    finally:
        strategy.extended.sparse_sums = None


class Sums:
    """Sums of gradients over the ranks, as an optimizer gets them.

    Args:
        strategy: strategy of the ranks.
        graph: whether the step is a `tf.function`.
    """

    def __init__(self, strategy, graph=True):
        self._strategy = strategy
        with strategy.scope():
            self._variables = [tf.Variable(tf.zeros([n])) for n in SIZES]
            self._optimizer = keras.optimizers.SGD(1.0)
            self._optimizer.build(self._variables)
        self._step = tf.function(self._run) if graph else self._run

    def _run(self, *parts):
        def replica():
            pairs = list(zip(parts, self._variables, strict=True))
            self._optimizer.apply_gradients(pairs)

        self._strategy.run(replica)

    def __call__(self, gradient):
        """The sum of this rank's gradient `[1000]` and those of the others."""
        for variable in self._variables:
            variable.assign(tf.zeros_like(variable))
        self._step(*map(tf.constant, np.split(gradient, [SIZES[0]])))
        return -np.concatenate([v.numpy() for v in self._variables])


def parts_of(steps, ranks):
    """Gradients by step and rank, `[steps, ranks, 1000]`."""
    rng = np.random.default_rng(3)
    return rng.normal(size=[steps, ranks, sum(SIZES)]).astype(np.float32)


def top_k_by_numpy(parts, share, feedback):
    """What TopK sums, step by step."""
    errors = np.zeros_like(parts[0])
    for gradients in parts:
        exact = gradients + errors
        total = np.zeros_like(exact[0])
        for rank, values in enumerate(exact):
            count = math.ceil(share * len(values))
            chosen = np.argsort(-np.abs(values))[:count]
            total[chosen] += values[chosen]
            errors[rank] = values
            errors[rank, chosen] = 0
        if not feedback:
            errors[:] = 0
        yield total


def top_k(strategy, folder):
    """Sums are those of the definition, bitwise equal on all ranks."""
    parts = parts_of(6, strategy.world_size)
    for share in (0.001, SHARE, 1.0):
        for feedback in (True, False):
            expected = list(top_k_by_numpy(parts, share, feedback))
            for graph in (True, False):
                sums = Sums(strategy, graph)
                with compressed(strategy, TopK(share, feedback)):
                    found = [sums(step[strategy.rank]) for step in parts]
                np.testing.assert_allclose(found, expected, rtol=1e-6)
                assert same_on_all_ranks(strategy, found)


def nothing_is_lost(strategy, folder):
    """What error feedback keeps arrives in later steps."""
    parts = parts_of(4, strategy.world_size)
    none = np.zeros_like(parts[0, 0])
    exact = parts.sum(axis=(0, 1))
    # A value is not among the drawn ones of 300 steps with a probability of
    # 0.9 ** 300, which is 2e-14.
    for compression, steps in ((TopK(SHARE), 10), (RandomK(SHARE), 300)):
        sums = Sums(strategy)
        with compressed(strategy, compression):
            found = [sums(step[strategy.rank]) for step in parts]
            assert np.abs(np.sum(found, axis=0) - exact).max() > 0.5
            found += [sums(none) for _ in range(steps)]
        assert same_on_all_ranks(strategy, found)
        np.testing.assert_allclose(np.sum(found, axis=0), exact, atol=1e-4)
        assert not found[-1].any()


def in_turns(strategy, folder):
    """What is kept of one model or optimizer is not added to another one's."""
    parts = parts_of(4, strategy.world_size)
    expected = list(top_k_by_numpy(parts, SHARE, True))
    with compressed(strategy, TopK(SHARE)):
        for graph in (True, False):
            one, other = Sums(strategy, graph), Sums(strategy, graph)
            found = []
            for step in parts:
                found.append(one(step[strategy.rank]))
                other(step[strategy.rank] ** 2)
            np.testing.assert_allclose(found, expected, rtol=1e-6)
        alone, one, other = (make_model(strategy) for _ in range(3))
        for ids, labels in data():
            alone.train_on_batch(ids, labels)
        for ids, labels in data():
            one.train_on_batch(ids, labels)
            other.train_on_batch(ids, 1 - labels)
        for found, expected in zip(
            weights(strategy, one), weights(strategy, alone), strict=True
        ):
            np.testing.assert_array_equal(found, expected)


def random_k(strategy, folder):
    """Each step has other indices, equal on all ranks; the mean is exact."""
    parts = parts_of(1, strategy.world_size)[0]
    exact, mine = parts.sum(axis=0), parts[strategy.rank]
    sums = Sums(strategy)
    steps = 500
    with compressed(strategy, RandomK(SHARE, error_feedback=False)):
        found = np.array([sums(mine) for _ in range(steps)])
    assert same_on_all_ranks(strategy, found)
    sent = found != 0
    assert (sent.sum(axis=1) == SHARE * exact.size).all()
    np.testing.assert_allclose(
        found[sent],
        (np.broadcast_to(exact, found.shape) / SHARE)[sent],
        atol=1e-4,
    )
    # Deviations from the mean, in units of the standard deviation.
    deviation = np.abs(exact) * np.sqrt((1 / SHARE - 1) / steps)
    errors = (found.mean(axis=0) - exact) / deviation
    assert np.abs(errors).max() < 5
    assert abs(np.sqrt(np.mean(errors**2)) - 1) < 0.15
    # Each of ten equal indices of a range, and of two steps in a row.
    assert np.abs(sent.mean(axis=0) - SHARE).max() < 0.07
    assert abs((sent[1:] & sent[:-1]).mean() - SHARE**2) < 2e-3


def uneven_ranges(strategy, folder):
    """Ranges of RandomK cover every value, whatever the share."""
    ones = np.ones([sum(SIZES)], np.float32)
    for share in (1e-6, 0.0033, 0.3, 0.7, 1.0):
        sums = Sums(strategy)
        with compressed(strategy, RandomK(share, error_feedback=False)):
            found = sums(ones)
        sent = found != 0
        assert sent.sum() == math.ceil(share * ones.size)
        sizes = found[sent] / strategy.world_size
        expected = ones.size / sent.sum()
        assert abs(sizes - expected).max() < 1
        if share == 1.0:
            np.testing.assert_array_equal(sizes, 1.0)


def counters_differ(strategy, folder):
    """Ranks that have counted other numbers of calls draw equal indices."""
    parts = parts_of(1, strategy.world_size)[0]
    none = np.zeros_like(parts[0])
    sums = Sums(strategy, graph=False)
    with compressed(strategy, RandomK(SHARE)):
        for _ in range(5):
            sums(none)
        if strategy.rank == 0:
            strategy.extended.sparse_sums = sparse_sums.sums_of(
                RandomK(SHARE), strategy.collectives
            )
        found = [sums(parts[strategy.rank])]
        found += [sums(none) for _ in range(300)]
    assert same_on_all_ranks(strategy, found)
    np.testing.assert_allclose(
        np.sum(found, axis=0), parts.sum(axis=0), atol=1e-4
    )


def not_finite(strategy, folder):
    """NaN and infinity arrive, and are not kept for the next steps."""
    good = parts_of(1, strategy.world_size)[0][strategy.rank]
    for compression in (TopK(SHARE), RandomK(SHARE)):
        for wrong in (math.nan, math.inf):
            sums = Sums(strategy)
            with compressed(strategy, compression):
                one = good.copy()
                if strategy.rank == strategy.world_size - 1:
                    one[::3] = wrong
                found = sums(one)
                assert not np.isfinite(found).all()
                assert np.isfinite(sums(good)).all()


def bytes_sent(strategy, folder):
    """Bytes are those that the classes state, and headers."""
    others, size = strategy.world_size - 1, sum(SIZES)
    count = math.ceil(0.01 * size)
    payload = {
        None: 2 * 4 * size * others / strategy.world_size,
        TopK(0.01): 8 * count * others,
        RandomK(0.01): 2 * 4 * count * others / strategy.world_size,
    }
    sent = {}
    for compression in payload:
        sums = Sums(strategy)
        context = contextlib.nullcontext()
        if compression is not None:
            context = compressed(strategy, compression)
        with context:
            sums(np.ones([size], np.float32))
            before = gradient_bytes(strategy)
            for _ in range(10):
                sums(np.ones([size], np.float32))
        sent[compression] = (gradient_bytes(strategy) - before) / 10
        # A direct sum of few bytes has one message per rank, of everything.
        most = 2 * payload[compression] + 3 * others * 192
        assert payload[compression] <= sent[compression] <= most, sent
    assert sent[TopK(0.01)] < sent[None] / 4
    assert sent[RandomK(0.01)] < sent[None] / 4


def gradient_bytes(strategy):
    labels = strategy.statistics()["labels"]
    return sum(
        labels.get(label, (0, 0))[1]
        for label in ("gradients", "gradients/samples")
    )


def least_squares(strategy, folder):
    """Training with error feedback reaches the solution.

    Samples of the ranks differ, so the largest values of a rank's gradient do
    not vanish at the solution.
    """
    rng = np.random.default_rng(11)
    x = rng.normal(size=[64, 30]).astype(np.float32)
    half = len(x) // 2
    y = x @ rng.normal(size=[30, 1]) + 2.0 * (np.arange(64)[:, None] < half)
    y = y.astype(np.float32)
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    best = float(np.mean((x @ solution - y) ** 2))

    def excess(compression, rate, epochs=600):
        context = contextlib.nullcontext()
        if compression is not None:
            context = compressed(strategy, compression)
        with context:
            with strategy.scope():
                layer = keras.layers.Dense(
                    1, use_bias=False, kernel_initializer="zeros"
                )
                model = keras.Sequential([keras.Input([30]), layer])
                model.compile(keras.optimizers.SGD(rate), "mse")
            dataset = tf.data.Dataset.from_tensors((x, y)).repeat(epochs)
            model.fit(dataset, epochs=1, verbose=0)
        kernel = layer.kernel.numpy()
        assert same_on_all_ranks(strategy, kernel)
        return float(np.mean((x @ kernel - y) ** 2)) - best

    start = float(np.mean(y**2)) - best
    assert excess(None, 0.05) < 1e-5 * start
    kept = excess(TopK(SHARE), 0.05)
    lost = excess(TopK(SHARE, error_feedback=False), 0.05)
    drawn = excess(RandomK(SHARE), 0.02, epochs=1500)
    assert kept < 1e-3 * start, (kept, start)
    assert drawn < 1e-3 * start, (drawn, start)
    assert lost > 10 * kept, (lost, kept)
    return start, kept, lost, drawn


def weighted_by_samples(strategy, folder):
    """The last batch leaves ranks without samples."""

    def trained():
        keras.utils.set_random_seed(5)
        model = make_model(strategy)
        model.fit(data(BATCH + 1), epochs=3, verbose=0)
        return weights(strategy, model)

    expected = trained()
    for compression in (TopK(1.0), RandomK(1.0)):
        with compressed(strategy, compression):
            found = trained()
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    with compressed(strategy, TopK(0.01)):
        found = trained()
    assert np.abs(found[-2] - expected[-2]).max() > 1e-3


def others_are_complete(strategy, folder):
    """Sums that a loop reads, and other dtypes, are sent completely."""
    values = tf.constant(np.arange(100.0, dtype=np.float32))

    @tf.function
    def step():
        def replica():
            context = tf.distribute.get_replica_context()
            return context.all_reduce("sum", values)

        return strategy.run(replica)

    with strategy.scope():
        variable = tf.Variable(tf.zeros([100], tf.float64))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])
    exact = strategy.world_size * values.numpy()
    with compressed(strategy, TopK(0.01)):
        np.testing.assert_array_equal(step(), exact)

        @tf.function
        def train():
            gradient = tf.cast(values, tf.float64)
            strategy.run(
                lambda: optimizer.apply_gradients([(gradient, variable)])
            )

        train()
    np.testing.assert_array_equal(variable.numpy(), -exact)


def checked(strategy, folder):
    """A check compares complete gradients, and finds them equal."""
    collectives, before = strategy.collectives, strategy.collectives.check
    collectives.check = "error"
    try:
        for compression in (TopK(0.01), RandomK(0.01)):
            with compressed(strategy, compression), said() as found:
                make_model(strategy).fit(data(), epochs=1, verbose=0)
            if strategy.rank == 0:
                assert any("step 1 of" in text for _, text in found), found
    finally:
        collectives.check = before


def bad_id(strategy, folder):
    """A step that fails keeps nothing for the next one."""
    good = np.zeros([8, 3], np.int64)
    bad = good.copy()
    if strategy.rank == strategy.world_size - 1:
        bad[7, 2] = ROWS + 5
    first, second, third = (np.arange(1.0, 101.0) % k for k in (3, 7, 11))
    with strategy.scope():
        layer = FullSparse(4, ROWS, sharding="row")

    def last_sum(compression, *steps):
        with strategy.scope():
            variable = tf.Variable(tf.zeros([100]))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([variable])

        @tf.function
        def step(ids, gradient):
            def replica():
                layer(ids)
                optimizer.apply_gradients([(gradient, variable)])

            strategy.run(replica)

        with compressed(strategy, compression):
            for ids, gradient in steps:
                variable.assign(tf.zeros([100]))
                try:
                    step(tf.constant(ids), tf.constant(gradient, tf.float32))
                    assert ids is not bad, "a bad id was accepted"
                except tf.errors.InvalidArgumentError:
                    assert ids is bad
        return variable.numpy()

    for compression in (TopK(SHARE), RandomK(SHARE)):
        expected = last_sum(compression, (good, first), (good, third))
        found = last_sum(
            compression, (good, first), (bad, second), (good, third)
        )
        np.testing.assert_array_equal(found, expected)


def optimizers(strategy, folder):
    """Gradients of our optimizers and of Keras's are sent in fewer bytes."""
    for make in (tfdist_ext.optimizers.Adagrad, keras.optimizers.Adagrad):
        sent = {}
        for compression in (TopK(1.0), TopK(0.02)):
            with compressed(strategy, compression):
                with strategy.scope():
                    layers = [FullSparse(4, ROWS), keras.layers.Dense(512)]
                    inputs = keras.Input([3], dtype="int64")
                    model = keras.Sequential([inputs, *layers])
                    model.compile(make(0.05), "mse")
                before = gradient_bytes(strategy)
                losses = model.fit(data(), epochs=4, verbose=0).history["loss"]
                sent[compression.share] = gradient_bytes(strategy) - before
            assert losses[-1] < losses[0]
        assert sent[0.02] < sent[1.0] / 4, sent


def large_shares(strategy, folder):
    """A share that saves no bytes warns, with a remedy."""
    for compression, warns in (
        (TopK(1 / strategy.world_size), True),
        (TopK(0.9 / strategy.world_size), False),
        (RandomK(0.9), False),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            sparse_sums.sums_of(compression, strategy.collectives)
        texts = [str(each.message) for each in found]
        assert bool(texts) == warns, (compression, texts)
        if warns:
            assert f"share below 1 / {strategy.world_size}" in texts[0]
