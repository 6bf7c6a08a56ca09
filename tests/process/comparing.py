# SPDX-License-Identifier: Apache-2.0
"""What several ranks train, compared with one process."""

import functools
import importlib

import numpy as np

# Only ours has these: what training starts from.
OURS_ONLY = ("initial/",)


class OneProcess:
    """What one process trains, to compare several ranks with.

    Args:
        pools: ranks, and processes that are none.
    """

    def __init__(self, pools):
        self._pools = pools
        self._stock = {}

    @functools.cache  # noqa: B019 (as long as the tests)
    def ours(self, module, case, keras):
        """What our strategy and layers train in one process, by name.

        Args:
            module: with functions `hybrid` and `stock`, and `of_stock`,
                which names all of a case that `stock` depends on.
            case: for both.
            keras: 3 or 2 (tf_keras).
        """
        scenario = f"{module}.hybrid"
        return self._pools.run(scenario, case, ranks=1, keras=keras)[0]

    def stock(self, module, case, keras):
        """What stock ops train without a strategy, from equal tables.

        Cases that differ in what stock ops do not have share it.

        Args:
            module: see `ours`.
            case: see `ours`.
            keras: see `ours`.
        """
        ours = self.ours(module, case, keras)
        initial = {k: v for k, v in ours.items() if k.startswith(OURS_ONLY)}
        values = tuple(value.tobytes() for value in initial.values())
        of_stock = importlib.import_module(module).of_stock(case)
        key = (module, of_stock, keras, tuple(initial), values)
        if key not in self._stock:
            (self._stock[key],) = self._pools.run(
                f"{module}.stock",
                *(of_stock, initial),
                ranks=1,
                keras=keras,
                strategy=False,
            )
        stock = self._stock[key]
        assert set(ours) == {*stock, *initial}
        for name, value in stock.items():
            error = largest_error(ours[name], value)
            assert error <= 1e-5, (name, error)
        return stock

    def check(self, module, case, ranks, keras, own_rule=False):
        """Trains on some ranks: they agree bit for bit, and with one to 1e-5.

        Args:
            module: see `ours`.
            case: see `ours`.
            ranks: how many.
            keras: see `ours`.
            own_rule: whether stock ops do not have the case's rule.
        """
        single = self.ours(module, case, keras)
        stock = {} if own_rule else self.stock(module, case, keras)
        first, *others = self._pools.run(
            f"{module}.hybrid", case, ranks=ranks, keras=keras
        )
        assert set(first) == set(single)
        for name, value in first.items():
            if name.startswith(OURS_ONLY):
                np.testing.assert_array_equal(value, single[name], name)
            error = largest_error(value, {**single, **stock}[name])
            assert error <= 1e-5, (name, error)
        for other in others:
            assert set(other) == set(first)
            for name, value in other.items():
                np.testing.assert_array_equal(value, first[name], name)


def largest_error(actual, expected):
    """Largest difference, relative to the largest value."""
    scale = max(np.abs(expected).max(), 1e-12)
    return np.abs(actual - expected).max() / scale
