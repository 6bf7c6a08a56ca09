# SPDX-License-Identifier: Apache-2.0
"""Keras 3: what is refused or fails."""

import contextlib

import keras
import tensorflow as tf
from files_models import goes_on
from files_models import names_in
from files_models import refused
from files_models import trained
from fit_models import data
from keras.models import save_model


def overwriting(strategy, folder):
    """A file that shall not be replaced is not, and nobody is asked."""
    model = trained(strategy)
    path = folder / "model.keras"
    model.save(path)
    model.save_weights(folder / "m.weights.h5")
    before = {p: p.read_bytes() for p in folder.iterdir()}
    model.fit(data(), epochs=1, verbose=0)
    for save in (
        lambda: model.save(path, overwrite=False),
        lambda: save_model(model, path, overwrite=False),
        lambda: model.save_weights(folder / "m.weights.h5", overwrite=False),
    ):
        with refused(FileExistsError, "overwrite=True", str(folder)):
            save()
    assert {p: p.read_bytes() for p in folder.iterdir()} == before
    strategy.collectives.barrier("compared")
    model.save(folder / "other.keras", overwrite=False)
    assert (folder / "other.keras").exists()


def refusals(strategy, folder):
    """What cannot hold whole tables is refused before it is written."""
    model = trained(strategy)
    archive = keras.export.ExportArchive()
    archive.track(model)
    signature = [tf.TensorSpec([None, 3], tf.int64)]
    archive.add_endpoint("serve", model.call, input_signature=signature)
    for path, save in {
        "m.h5": model.save,
        "e.tflite": lambda p: model.export(p, format="litert"),
        "e.onnx": lambda p: model.export(p, format="onnx"),
        "a": archive.write_out,
    }.items():
        with refused(ValueError, "partitioned tables", str(folder / path)):
            save(folder / path)
    with refused(ValueError, "partitioned tables", "TFLite"):
        tf.lite.TFLiteConverter.from_keras_model(model)
    # A file of one process, which holds whole tables.
    if strategy.rank == 0:
        layers = [keras.layers.Dense(n, name=f"layer{n}") for n in (4, 1)]
        alone = keras.Sequential([keras.Input([3]), *layers], name="alone")
        alone.save(folder / "alone.h5")
    strategy.collectives.barrier("written")
    for arguments in ({}, {"by_name": True, "skip_mismatch": True}):
        with refused(Exception, "legacy format", "alone.h5"):
            model.load_weights(folder / "alone.h5", **arguments)
    assert names_in(folder) == {"alone.h5"}
    goes_on(strategy, model)


def failures(strategy, folder):
    """What one rank cannot write fails on all at once, and nothing is left."""
    model = trained(strategy)
    model.save(folder / "m.keras")
    before = (folder / "m.keras").read_bytes()
    for save, path, error in (
        (model.save, "missing/m.keras", "no folder"),
        (model.save, "m.keras/m.keras", "no folder"),
        (model.save_weights, "missing/m.weights.h5", "no folder"),
        (
            lambda p: model.save_weights(p, max_shard_size=1e-8),
            "s.weights.json",
            "exceeds the maximum shard size",
        ),
    ):
        with refused(Exception, error):
            save(folder / path)
    for failing in range(strategy.world_size):
        with (
            one_rank_fails(strategy, model, failing),
            refused(Exception, "disk is full"),
        ):
            model.save(folder / "m.keras")
        goes_on(strategy, model)
    strategy.collectives.barrier("failed")
    assert names_in(folder) == {"m.keras"}
    assert (folder / "m.keras").read_bytes() == before
    strategy.collectives.barrier("compared")
    if strategy.rank == 0:
        (folder / "m.keras").write_bytes(before[:3000])
    strategy.collectives.barrier("damaged")
    with refused(Exception, "m.keras"), strategy.scope():
        keras.models.load_model(folder / "m.keras")
    goes_on(strategy, model)


@contextlib.contextmanager
def one_rank_fails(strategy, model, failing):
    """A rank cannot write its dense layer, as if its disk were full."""
    dense = model.layers[-1]

    def fail(store):
        raise OSError("disk is full")

    if strategy.rank == failing:
        dense.save_own_variables = fail
    try:
        yield
    finally:
        if strategy.rank == failing:
            del dense.save_own_variables
