# SPDX-License-Identifier: Apache-2.0
"""Models that are exported to plain TensorFlow, at any number of ranks."""

import contextlib

import numpy as np
import serving_models
import tensorflow as tf
from files_models import goes_on
from files_models import names_in
from files_models import refused
from files_models import trained

import tfdist_ext
from tfdist_ext.embedding.whole_tables import row_blocks
from tfdist_ext.keras_internals import KERAS_3

keras = tf.keras
# Rows of a sample are added up in another order than on several ranks.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def every_layer(strategy, folder):
    """What is served is what the model gives, and the tables bit for bit."""
    _check_every_layer(strategy, folder, "float32")


def every_layer_in_16_bits(strategy, folder):
    """The same of tables that are trained and served in 16 bits."""
    _check_every_layer(strategy, folder, "bfloat16")


def _check_every_layer(strategy, folder, dtype):
    with strategy.scope():
        model = serving_models.Everything(strategy.world_size, dtype)
    inputs = serving_models.batch()
    expected = strategy.run(lambda given: model(given), args=(inputs,))
    path = folder / "served"
    tfdist_ext.export(model, path, dtype, inputs=inputs)
    tables = model.embedding.get_embedding_tables()
    collectives, wide = strategy.collectives, strategy.gather_table(model.wide)
    tables["wide"] = tf.cast(wide, dtype)
    # More of them than ranks, the last one smaller.
    for first, block in row_blocks(model.wide.kernel, collectives, 12):
        assert len(block) <= 4
        np.testing.assert_array_equal(block, wide[first : first + len(block)])
    if strategy.rank > 0:
        return
    served = tf.saved_model.load(str(path))
    assert set(served.tables) >= {*tables, "left", "right"}
    for name, table in tables.items():
        np.testing.assert_array_equal(served.tables[name].values, table)
    if dtype == "bfloat16":
        # The tables of other layers have been float32.
        expected = {n: v for n, v in expected.items() if n in inputs["ids"]}
    _assert_close(served.serve(inputs), expected)
    other = serving_models.batch(seed=1)
    names = served.signatures["serving_default"].structured_input_signature[1]
    flat = {name: _tensor(other, name) for name in names}
    found = served.signatures["serving_default"](**flat)
    np.testing.assert_array_equal(
        found["kept"], served.serve(other)["kept"].flat_values
    )


def _tensor(batch, name):
    """The tensor of a signature, by how docs/serving.md names it."""
    for ending in ("row_splits", "indices", "values", "shape"):
        if name.endswith(f"_{ending}"):
            attribute = "dense_shape" if ending == "shape" else ending
            found = _at(batch, name.removesuffix(f"_{ending}"))
            return getattr(found, attribute)
    found = _at(batch, name)
    return getattr(found, "flat_values", found)


def _at(batch, name):
    for part in ("ids_", "weights_"):
        if name.startswith(part):
            return batch[part[:-1]][name.removeprefix(part)]
    return batch[name]


def _assert_close(found, expected):
    assert set(found) >= set(expected)
    for name in expected:
        pair = found[name], expected[name]
        pair = [getattr(value, "flat_values", value) for value in pair]
        np.testing.assert_allclose(*pair, **CLOSE, err_msg=name)


def stock_ways(strategy, folder):
    """Keras's and TensorFlow's own ways lead there, also within the scope."""
    model = trained(strategy)
    ids = np.arange(24).reshape(8, 3)
    data = tf.data.Dataset.from_tensor_slices(ids).batch(8)
    for name, save in {
        "keras": model.export,
        "tensorflow": lambda path: tf.saved_model.save(model, path),
        # Replaced.
        "keras again": lambda path: model.export(f"{folder}/keras"),
    }.items():
        goes_on(strategy, model)
        with strategy.scope():
            save(f"{folder}/{name}")
        expected = model.predict(data, verbose=0)
        path = f"{folder}/{name.removesuffix(' again')}"
        served = tf.saved_model.load(path)
        np.testing.assert_allclose(served.serve(ids), expected, **CLOSE)
        strategy.collectives.barrier("loaded")
    assert {name.split("/")[0] for name in names_in(folder)} == {
        "keras",
        "tensorflow",
    }


def int8(strategy, folder):
    """A number errs by half a step of its row's scale at most."""
    model = trained(strategy)
    tfdist_ext.export(model, folder / "served", "int8")
    tfdist_ext.export(model, folder / "mapped", "int8", "files")
    with refused(Exception, "exists, and a model whose tables are files"):
        tfdist_ext.export(model, folder / "mapped", "int8", "files")
    with refused(ValueError, "that takes deltas"):
        tfdist_ext.export(model, folder / "new", tables="files", deltas=True)
    table = strategy.gather_table(model.get_layer("sparse"))
    if strategy.rank > 0:
        return
    whole, mapped = (
        tf.saved_model.load(str(folder / name)) for name in ("served", "mapped")
    )
    ids = np.arange(24).reshape(8, 3)
    np.testing.assert_array_equal(mapped.serve(ids), whole.serve(ids))
    (served,) = whole.tables.values()
    scales = served.scales.numpy()
    np.testing.assert_array_equal(scales, abs(table).max(1) / np.float32(127))
    assert served.values.dtype == tf.int8
    errors = abs(served.values.numpy() * scales[:, np.newaxis] - table)
    assert (errors.max(1) <= scales * 0.5001).all()


def requests_for_a_server(strategy, folder):
    """Versions, and warm-up requests as TensorFlow Serving reads them."""
    from tensorflow_serving.apis import prediction_log_pb2

    with strategy.scope():
        model = serving_models.Everything(strategy.world_size, "float32")
    batches = [serving_models.batch(seed) for seed in range(2)]
    strategy.run(lambda given: model(given), args=(batches[0],))
    path = folder / "model" / "1"
    tfdist_ext.export(model, path, inputs=batches[0], warm_up=batches)
    if strategy.rank > 0:
        return
    assert [each.name for each in (folder / "model").iterdir()] == ["1"]
    served = tf.saved_model.load(str(path))
    predict = served.signatures["serving_default"]
    file = path / "assets.extra" / "tf_serving_warmup_requests"
    records = tf.data.TFRecordDataset(str(file)).as_numpy_iterator()
    for batch, record in zip(batches, records, strict=True):
        log = prediction_log_pb2.PredictionLog.FromString(record)
        assert log.WhichOneof("log_type") == "predict_log"
        request = log.predict_log.request
        assert request.model_spec.signature_name == "serving_default"
        tensors = {n: tf.make_ndarray(v) for n, v in request.inputs.items()}
        given = predict.structured_input_signature[1]
        assert tensors.keys() == given.keys()
        found = predict(**{n: tf.constant(v) for n, v in tensors.items()})
        expected = served.serve(batch)
        assert len(found) >= len(expected)
        for name, values in expected.items():
            if isinstance(values, tf.Tensor):
                np.testing.assert_array_equal(found[name], values)


def wrong_arguments(strategy, folder):
    """Batches that are no inputs, and a model without tables."""
    model, ids = trained(strategy), np.arange(24).reshape(8, 3)
    with strategy.scope():
        new = serving_models.Growing()
    for text, arguments in (
        ("have no tables yet", {"model": new, "inputs": ids}),
        (
            "Batch 1 of `warm_up` is no input of the model",
            {"warm_up": [ids, ids[:, :2]]},
        ),
        ("at most 1000 batches. Received: 1001", {"warm_up": [ids] * 1001}),
    ):
        given = {"model": model, "path": folder / "model", **arguments}
        with refused(ValueError, text):
            tfdist_ext.export(**given)
        strategy.collectives.barrier("refused")
    assert not names_in(folder)


def failures(strategy, folder):
    """Whatever cannot be done says so on all ranks and leaves nothing."""
    model = trained(strategy)
    signature = tf.function(model.call).get_concrete_function(
        tf.TensorSpec([None, 3], tf.int64)
    )
    blocked = folder / "no model"
    blocked.mkdir(exist_ok=True)
    (blocked / "file").touch()
    export = tfdist_ext.export

    class Exchanging(keras.Model):
        def call(self, inputs):
            return strategy.collectives.all_reduce([model(inputs)], "mine")[0]

    with strategy.scope():
        exchanging, unknown = Exchanging(), keras.Model()
    ids = np.arange(24).reshape(8, 3)
    for error, text, save in (
        (ValueError, "int4", lambda p: export(model, p, "int4")),
        (ValueError, "keras.Sequential", lambda p: export(model.layers[0], p)),
        (Exception, "is not a SavedModel", lambda p: export(model, blocked)),
        (
            Exception,
            "Tfdist>AllReduce",
            lambda p: export(exchanging, p, inputs=ids),
        ),
        (
            ValueError,
            "takes no `signatures`",
            lambda p: tf.saved_model.save(model, p, signature),
        ),
        *(
            [(Exception, "Pass `inputs`", lambda p: export(unknown, p))]
            if KERAS_3
            else []
        ),
    ):
        with refused(error, text):
            save(str(folder / "model"))
        strategy.collectives.barrier("refused")
    for failing in (0, strategy.world_size - 1):
        with (
            _one_rank_cannot_write(strategy, failing),
            refused(Exception, "disk is full"),
        ):
            export(model, folder / "model")
        goes_on(strategy, model)
    strategy.collectives.barrier("failed")
    assert names_in(folder) == {"no model", "no model/file"}


@contextlib.contextmanager
def _one_rank_cannot_write(strategy, failing):
    """A rank cannot write its slices, as if its disk were full."""
    write = tf.raw_ops.SaveV2

    def fail(**arguments):
        raise OSError("disk is full")

    if strategy.rank == failing:
        tf.raw_ops.SaveV2 = fail
    try:
        yield
    finally:
        tf.raw_ops.SaveV2 = write


def for_another_process(strategy, folder):
    """Exports trained models, and what they predict."""
    model = trained(strategy)
    ids = np.arange(24).reshape(8, 3)
    with strategy.scope():
        growing = serving_models.Growing()
        growing.compile(tfdist_ext.optimizers.SGD(0.1), "mse")
    # Some ids are seen twice, some once, some not at all.
    seen = np.array([*range(12), *range(6), *range(6)]).reshape(8, 3)
    learnt = tf.data.Dataset.from_tensor_slices((seen, np.ones([8, 1])))
    growing.fit(learnt.batch(8), verbose=0)
    tfdist_ext.export(growing, folder / "grown", inputs=ids, deltas=True)
    data = tf.data.Dataset.from_tensor_slices(ids).batch(8)
    tfdist_ext.export(model, folder / "served")
    tfdist_ext.export(model, folder / "mapped", tables="files")
    expected = model.predict(data, verbose=0)
    grown = growing.predict(data, verbose=0)
    assert len(np.unique(grown)) == 3  # keys of two samples, and zeros
    later = tf.data.Dataset.from_tensor_slices((seen + 10, np.ones([8, 1])))
    growing.fit(later.batch(8), verbose=0)
    tfdist_ext.export_delta(growing, folder / "delta")
    grown_on = growing.predict(data, verbose=0)
    if strategy.rank == 0:
        noted = {
            "ids": ids,
            "expected": expected,
            "grown": grown,
            "grown_on": grown_on,
        }
        np.savez(folder / "expected.npz", **noted)
