# SPDX-License-Identifier: Apache-2.0
"""Files that are there already: who asks the user whether to overwrite them.

Arguments: the folder.
"""

import pathlib
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdist_ext

keras = tf.keras


def model_of():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def asked(save):
    """How often the user was asked, who said no."""
    with mock.patch("builtins.input", return_value="n") as asks:
        save()
    return asks.call_count


def main(folder):
    strategy = tfdist_ext.HybridParallelStrategy()
    with strategy.scope():
        ours = model_of()
    plain = model_of()
    mine = folder / f"of_rank_{strategy.rank}.keras"
    shared = folder / "shared.keras"
    for model, path in ((ours, shared), (plain, mine)):
        assert asked(lambda m=model, p=path: m.save(p, overwrite=False)) == 0
    assert asked(lambda: plain.save(mine, overwrite=False)) == 1
    try:
        ours.save(shared, overwrite=False)
    except FileExistsError as error:
        assert "there is no prompt" in str(error)
    else:
        raise AssertionError("overwritten")
    strategy.close()
    # The model is this rank's now.
    assert asked(lambda: ours.save(mine, overwrite=False)) == 1
    assert asked(lambda: plain.save(mine, overwrite=False)) == 1
    ours.save(mine)
    again = keras.models.load_model(mine)
    for a, b in zip(again.weights, ours.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
