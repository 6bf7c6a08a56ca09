# SPDX-License-Identifier: Apache-2.0
"""What several ranks trained, compared with one process."""

import numpy as np


def check_ranks(output, ranks, single, stock):
    """Ranks agree bit for bit, and with one process to 1e-5.

    Args:
        output: the path that the ranks were given.
        ranks: how many there were.
        single: results of ours in one process; has all names.
        stock: results of stock ops in one process; has some.
    """
    for name in stock.files:
        assert largest_error(single[name], stock[name]) <= 1e-5, name
    results = [
        np.load(output.with_suffix(f".{rank}.npz")) for rank in range(ranks)
    ]
    for name in results[0].files:
        values = [result[name] for result in results]
        if "/initial/" in name:
            np.testing.assert_array_equal(values[0], single[name], name)
        else:
            expected = stock if name in stock.files else single
            error = largest_error(values[0], expected[name])
            assert error <= 1e-5, (name, error)
        for other in values[1:]:
            np.testing.assert_array_equal(other, values[0], name)


def largest_error(actual, expected):
    """Largest difference, relative to the largest value."""
    scale = max(np.abs(expected).max(), 1e-12)
    return np.abs(actual - expected).max() / scale
