# SPDX-License-Identifier: Apache-2.0
"""What an error that ends a rank shows, and what it leaves out."""

import subprocess
import sys

import pytest

from tfdist_ext.strategy import reporter

PROGRAM = """
import sys
import numpy as np
import tensorflow as tf
import tfdist_ext

strategy = tfdist_ext.HybridParallelStrategy()
if "all" in sys.argv:
    tf.debugging.disable_traceback_filtering()

def fail(batch, logs):
    raise ValueError("the reason")

keras = tf.keras
with strategy.scope():
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
ones = np.ones([4, 1])
fails = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
print("begins", file=sys.stderr, flush=True)
model.fit(ones, ones, verbose=0, callbacks=[fails])
"""


@pytest.mark.parametrize("shown", ["few", "all"])
def test_the_reason_comes_first(shown):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, shown],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    told = done.stderr.partition("begins\n")[2]
    frames = told.count('  File "')
    assert told.endswith("ValueError: the reason\n")
    if shown == "few":
        assert told.startswith("ValueError: the reason\nTraceback (most"), told
        assert "tfdist_ext" not in told and frames == 2, told
    else:
        assert told.startswith("Traceback (most recent"), told
        assert "tfdist_ext" in told and frames > 5, told


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("only this", "only this"),
        ("", ""),
        (
            "{{function_node __wrapped__Tfdist>AllReduce_device_/cpu:0}} rank "
            "0: all_reduce failed: rank 1 is gone [Op:Tfdist>AllReduce]",
            "rank 0: all_reduce failed: rank 1 is gone [Op:Tfdist>AllReduce]",
        ),
        (
            "Graph execution error:\n\nDetected at node Reduce defined at "
            '(most recent call last):\n  File "x.py", line 3, in fit\n\n'
            "rank 0: reduce failed\n\t [[{{node Reduce}}]]",
            "rank 0: reduce failed",
        ),
    ],
)
def test_the_line_that_says_why(text, line):
    assert reporter.reason_of(ValueError(text)) == f"ValueError: {line}"


def test_a_traceback_of_this_package_alone_stays():
    with pytest.raises(AttributeError) as error:
        reporter.without_frames(3)
    inner = error.value.__traceback__.tb_next
    assert reporter.without_frames(inner) is inner
