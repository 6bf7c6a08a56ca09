# SPDX-License-Identifier: Apache-2.0
"""Trains one step, as a rank of whoever has started it, and writes the result.

Argument: a folder, for files that are named after rank and number of ranks.
"""

import sys

import numpy as np
from start_program import train

if __name__ == "__main__":
    result, rank, ranks = train(eagerly=True)
    np.savez(f"{sys.argv[1]}/{rank}-of-{ranks}.npz", *result)
