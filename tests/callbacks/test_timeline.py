# SPDX-License-Identifier: Apache-2.0
"""Where a trace of one process says that the time of a step goes."""

import time

import numpy as np
import pytest

import tfdist_ext
from tfdist_ext.callbacks import Timeline
from tfdist_ext.callbacks.timeline import keras
from tfdist_ext.launch import trace


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
@pytest.mark.parametrize("behind", [True, False])
def test_time_in_callbacks_has_a_column(tmp_path, hook, behind):
    strategy = tfdist_ext.HybridParallelStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    slow = keras.callbacks.LambdaCallback(
        **{hook: lambda batch, logs: time.sleep(0.03)}
    )
    timeline = Timeline(tmp_path / "trace.json", (2, 5), kernels=False)
    callbacks = [timeline, slow] if behind else [slow, timeline]
    ones = np.ones([8, 1], np.float32)
    model.fit(ones, ones, batch_size=1, verbose=0, callbacks=callbacks)
    events = trace.read(tmp_path / "trace.json")
    steps = [e.name for e in events if e.kind == trace.STEP]
    assert steps == ["step 2", "step 3", "step 4"]
    _, _, row, _ = trace.report(events).splitlines()
    _, step, reading, *_ = map(float, row.split())
    spent = float(row.split()[6])
    # Of the first or the last step some are before or behind the trace.
    assert spent > 0.6 * 30, row
    assert reading + spent <= step + 0.02, row
