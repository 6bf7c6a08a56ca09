# SPDX-License-Identifier: Apache-2.0
"""All numbers of 16 bits, summed over the ranks, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from tests.thread_ranks import run_on_ranks
from tfdist_ext.ops import collective_ops


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_numbers_of_16_bits_are_summed_as_floats(dtype):
    """And rounded once, to nearest; subnormal numbers are no zeros."""
    numpy_type = tf.as_dtype(dtype).as_numpy_dtype
    every = np.arange(1 << 16, dtype=np.uint16)
    others = np.random.default_rng(0).permutation(every)
    numbers = [
        np.concatenate([every, every]),
        np.concatenate([others, 0 * every]),
    ]
    numbers = [each.view(numpy_type) for each in numbers]

    def total(group):
        (sums,) = collective_ops.all_reduce(
            group, [tf.constant(numbers[group.rank])], tag=2
        )
        return sums.numpy()

    with np.errstate(over="ignore", invalid="ignore"):
        exact = numbers[0].astype(np.float32) + numbers[1].astype(np.float32)
        expected = exact.astype(numpy_type)
    nan = np.isnan(exact)
    for sums in run_on_ranks(2, total):
        assert np.isnan(sums[nan].astype(np.float32)).all()
        np.testing.assert_array_equal(
            sums[~nan].view(np.uint16), expected[~nan].view(np.uint16)
        )
