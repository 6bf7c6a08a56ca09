# SPDX-License-Identifier: Apache-2.0
"""The command line of programs that train the cases they are given."""

import argparse
import pathlib

import numpy as np

import tfdist_ext


def run_cases(hybrid, stock):
    """Trains every case and writes what it gives to OUTPUT.<rank>.npz.

    Args:
        hybrid: called with the strategy, a case and the results to fill.
        stock: with a case, the results and the initial tables (--stock).
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--stock")
    arguments = parser.parse_args()
    result, rank = {}, 0
    if arguments.stock:
        for case in arguments.cases:
            stock(case, result, np.load(arguments.stock))
    else:
        strategy = tfdist_ext.HybridParallelStrategy()
        rank = strategy.rank
        for case in arguments.cases:
            hybrid(strategy, case, result)
    np.savez(arguments.output.with_suffix(f".{rank}.npz"), **result)
