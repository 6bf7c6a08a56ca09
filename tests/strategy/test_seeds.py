# SPDX-License-Identifier: Apache-2.0
"""What ranks take over of rank 0's generators, one rank after the other.

Ranks in processes of their own: `generators` in tests/process/fit_scenarios.py.
"""

import random
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.strategy import bootstrap


class Ranks:
    """Stands in for the collectives of two ranks that run in turn."""

    def __init__(self):
        self.sent = []

    def __call__(self, rank):
        def all_gather(tensor, label):
            self.sent[rank:] = [tensor]
            return tf.concat(self.sent, 0)

        return types.SimpleNamespace(
            group=types.SimpleNamespace(rank=rank), all_gather=all_gather
        )


@pytest.fixture(autouse=True)
def state(monkeypatch):
    """TensorFlow's seed in `seed`; all generators are as before afterwards."""
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    seed = [None]
    monkeypatch.setattr(internals, "global_seed", lambda: seed[0])
    monkeypatch.setattr(
        tf.random, "set_seed", lambda value: seed.__setitem__(0, value)
    )
    yield seed
    random.setstate(python)
    np.random.set_state(numpy)


def draws():
    """One of everything, halves of pairs too."""
    return (
        np.random.permutation(50).tolist(),
        random.sample(range(50), 50),
        np.random.normal(),
        random.gauss(0, 1),
    )


def test_other_ranks_go_on_where_rank_0_does(state):
    ranks = Ranks()
    draws()  # of each pair of Gaussian numbers, one is kept for later
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    bootstrap.share_seeds(ranks(0))
    drawn, state[0] = state[0], None
    first = draws()
    random.setstate(python)
    np.random.set_state(numpy)
    assert draws() == first  # nothing has changed on rank 0
    random.seed(1)
    np.random.seed(1)
    bootstrap.share_seeds(ranks(1))
    assert draws() == first
    assert state[0] == drawn is not None


@pytest.mark.parametrize("seed", [0, -1, 7, 2**70])
def test_what_all_ranks_have_seeded_alike_stays(state, seed, caplog):
    ranks = Ranks()
    expected = []
    for rank in range(2):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        state[0] = seed
        bootstrap.share_seeds(ranks(rank))
        expected.append(draws())
        assert state[0] == seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    assert expected == [draws()] * 2
    assert "different seeds" not in caplog.text


def test_different_seeds_of_tensorflow_are_kept_with_a_warning(state, caplog):
    ranks = Ranks()
    for rank in range(2):
        state[0] = rank
        bootstrap.share_seeds(ranks(rank))
        assert state[0] == rank
    assert "different seeds ([0, 1])" in caplog.text
