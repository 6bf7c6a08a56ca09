# SPDX-License-Identifier: Apache-2.0
"""What looks like Horovod's own is refused; the real one is elsewhere."""

import pytest

from tfdist_ext.strategy import refused


def of(module, name):
    """An object of a class of that module, which need not be installed."""
    return type(name, (), {"__module__": module})()


def test_an_optimizer_of_horovod_is_refused_by_name():
    # Horovod gives its class the name of the one that it wraps.
    wrapped = of("horovod._keras", "SGD")
    within = type("LossScaleOptimizer", (), {"inner_optimizer": wrapped})()
    for optimizer in (wrapped, within):
        with pytest.raises(ValueError, match=r"DistributedOptimizer.*the SGD"):
            refused.check_optimizer(optimizer)
    for optimizer in (None, of("keras.optimizers", "SGD"), of("horovod_", "X")):
        refused.check_optimizer(optimizer)


def test_a_callback_of_horovod_is_refused_by_name():
    name = "BroadcastGlobalVariablesCallback"
    callback = of("horovod.tensorflow.keras.callbacks", name)
    other = of("keras.callbacks", "EarlyStopping")
    container = type("CallbackList", (), {"callbacks": [other, callback]})()
    for given in (callback, [other, callback], container):
        with pytest.raises(
            ValueError, match=rf"hvd\.callbacks\.{name} repeats"
        ):
            refused.check_callbacks(given)
    for given in (None, [], other, [other]):
        refused.check_callbacks(given)
