# SPDX-License-Identifier: Apache-2.0
"""Calls functions on ranks, from a process that has used TensorFlow.

    python notebook_program.py RANKS [result]

The last line is a JSON object: results and errors, by name. With `result` it
has no errors.
"""

import json
import sys

import notebook_functions
import tensorflow as tf

import tfdist_ext


def main(ranks, only=""):
    found = {
        "sum": float(tf.reduce_sum(tf.ones([3])))
    }  # TensorFlow has threads
    notebook = tfdist_ext.launch.notebook
    found["result"] = notebook(notebook_functions.train, (3,), ranks=ranks)
    if only == "result":
        return found
    for how in ("error", "signal"):
        try:
            notebook(notebook_functions.fail_on_last, (how,), ranks=ranks)
        except RuntimeError as error:
            found[how] = str(error)
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return found
    factor = 3
    found["of main"] = notebook(lambda number: number * factor, (5,), ranks=1)
    return found


if __name__ == "__main__":
    print("\n" + json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
