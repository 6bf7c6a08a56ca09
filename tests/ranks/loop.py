# SPDX-License-Identifier: Apache-2.0
"""A rank of a pool: runs scenarios by name until there are no more.

Usage: loop.py SOCKET OPTIONS

OPTIONS are those of the strategy, as JSON; "null" for none. An object of
`tfdist_ext.consistency` is a list: its class, and its arguments by name.
"""

import gc
import importlib
import json
import multiprocessing.connection
import os
import sys
import traceback
import zlib
from typing import Any

import tensorflow as tf

import tfdist_ext


def run(strategy: Any, module: str, name: str, arguments: Any) -> Any:
    """Runs a scenario as if none had run before."""
    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(zlib.crc32(f"{module}.{name}".encode()))
    gc.collect()
    # TensorFlow keeps much of every model; to search it all took half a second
    # before each scenario after the hundredth.
    gc.freeze()
    scenario = getattr(importlib.import_module(module), name)
    return scenario(strategy, *arguments)


def consistency(described: Any) -> Any:
    """An object of `tfdist_ext.consistency`."""
    name, arguments = described
    given = {
        key: consistency(value) if isinstance(value, list) else value
        for key, value in arguments.items()
    }
    return getattr(tfdist_ext.consistency, name)(**given)


def main() -> None:
    options = json.loads(sys.argv[2])
    strategy = None
    if options is not None:
        if "consistency" in options:
            options["consistency"] = consistency(options["consistency"])
        strategy = tfdist_ext.HybridParallelStrategy(**options)
    connection = multiprocessing.connection.Client(sys.argv[1])
    connection.send((strategy.rank if strategy else 0, os.getpid()))
    while (request := connection.recv()) is not None:
        try:
            answer = (True, run(strategy, *request))
        except BaseException:
            answer = (False, traceback.format_exc())
        sys.stdout.flush()
        connection.send(answer)


if __name__ == "__main__":
    main()
