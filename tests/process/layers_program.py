# SPDX-License-Identifier: Apache-2.0
"""What users do with layers and tables; run on two or more ranks.

Usage: layers_program.py FOLDER SCENARIO...

A scenario is a function of one of the modules below. It checks for itself, on
every rank.
"""

import pathlib
import sys

import copy_scenarios
import kernel_scenarios
import overlap_scenarios
import table_scenarios

import tfdist_ext

MODULES = (
    copy_scenarios,
    kernel_scenarios,
    overlap_scenarios,
    table_scenarios,
)


def main():
    folder = pathlib.Path(sys.argv[1])
    strategy = tfdist_ext.HybridParallelStrategy(timeout=60)
    for name in sys.argv[2:]:
        (scenario,) = (vars(m)[name] for m in MODULES if name in vars(m))
        scenario(strategy, folder)
        print(f"{name} done", flush=True)
        (folder / f"{name}.{strategy.rank}").touch()


if __name__ == "__main__":
    main()
