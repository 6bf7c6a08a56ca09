# SPDX-License-Identifier: Apache-2.0
"""Models as ONNX files, compared with the models in onnxruntime."""

import re
import sys
from unittest import mock

import numpy as np
import tensorflow as tf
from files_models import goes_on
from files_models import names_in
from files_models import refused
from files_models import trained

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig
from tfdist_ext.saving import onnx_files
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
BATCH, ROWS, DIM = 6, 37, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
# Of features: the combiner, and ids per sample. All are looked up with and
# without weights.
KINDS = {
    "mean": ("mean", 5),
    "roots": ("sqrtn", 4),
    "whole": ("mean", 3),
    "sum": ("sum", 2),
    "kept": (None, 3),
}
# Features whose ids may be out of range.
IGNORED = ("mean", "roots")


def normal(seed):
    return keras.initializers.RandomNormal(0.0, 0.3, seed=seed)


def placements(ranks):
    if ranks == 1:
        return ["data_parallel"] * len(KINDS)
    return [
        TablePlacement.row_wise(ranks),
        TablePlacement.column_wise(ranks),
        TablePlacement.table_wise(ranks - 1),
        TablePlacement.row_wise(ranks, deduplicate=True),
        TablePlacement.data_parallel(),
    ]


def embedding(ranks, name, dtype="float32"):
    features = {}
    for place, (key, (combiner, count)) in zip(
        placements(ranks), KINDS.items(), strict=True
    ):
        table = TableConfig(
            f"{name}_{key}",
            ROWS + len(features),
            DIM,
            normal(len(features)),
            combiner=combiner,
            placement=place,
            dtype=dtype,
            out_of_range="ignore" if key in IGNORED else "error",
        )
        kept = (count,) if combiner is None else ()
        features[key] = FeatureConfig(
            key, table, (None, count), (None, *kept, DIM)
        )
    return DistributedEmbedding(features, name=name)


class Everything(keras.Model):
    """Results of all layers as they are, and of usual dense layers."""

    def __init__(self, ranks, dtype="float32"):
        super().__init__()
        self.plain = embedding(ranks, "plain", dtype)
        self.weighted = embedding(ranks, "weighted", dtype)
        self.wide = FullSparse(
            3, ROWS, "relu", kernel_initializer=normal(11), name="wide"
        )
        self.pair = [
            FullSparse(2, ROWS, kernel_initializer=normal(12), name="left"),
            FullSparse(3, ROWS, kernel_initializer=normal(13), name="right"),
        ]
        self.shared = SharedExchange(self.pair)
        self.items = Embedding(ROWS, DIM, normal(14), mask_zero=True)
        self.norm = keras.layers.BatchNormalization()
        self.hidden = keras.layers.Dense(
            7, "gelu", kernel_initializer=normal(15)
        )
        self.top = keras.layers.Dense(
            2, "softmax", kernel_initializer=normal(16)
        )

    def call(self, inputs, training=False):
        ids = inputs["ids"]
        found = {f"plain_{k}": v for k, v in self.plain(ids).items()}
        weighted = self.weighted(ids, inputs["weights"])
        found |= {f"weighted_{k}": v for k, v in weighted.items()}
        found["wide"] = self.wide(ids["sum"])
        found["left"], found["right"] = self.shared([ids["sum"], ids["kept"]])
        found["items"] = self.items(ids["kept"])
        found["items_again"] = self.items(ids["sum"])
        joined = [
            tf.reshape(tf.cast(v, tf.float32), [-1, np.prod(v.shape[1:])])
            for v in found.values()
        ]
        joined = tf.concat([*joined, inputs["numbers"]], 1)
        found["hidden"] = self.hidden(self.norm(joined, training=training))
        found["top"] = self.top(found["hidden"])
        numbers = inputs["numbers"]
        found["logs"] = tf.where(numbers > 0, tf.math.log(numbers), 7.0)
        return found


def batch(seed=0, samples=6):
    rng = np.random.default_rng(seed)
    sizes = {key: [samples, count] for key, (_, count) in KINDS.items()}
    ids = {key: rng.integers(0, ROWS, size) for key, size in sizes.items()}
    ids["mean"][:, 0] = 10**6
    ids["mean"][1, :] = -3
    ids["roots"][:, 2] = -1
    weights = {key: rng.random(size, np.float32) for key, size in sizes.items()}
    numbers = rng.random([samples, 3], np.float32)
    numbers[:, 1] = 0
    given = {"ids": ids, "weights": weights, "numbers": numbers}
    return tf.nest.map_structure(tf.constant, given)


def flat(given):
    """Inputs by the names that docs/serving.md gives them."""
    found = {"numbers": given["numbers"].numpy()}
    for kind in ("ids", "weights"):
        for name, value in given[kind].items():
            found[f"{kind}_{name}"] = value.numpy()
    return found


def run(path, given):
    """Outputs of a file in onnxruntime, by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path))
    assert {each.name for each in session.get_inputs()} == set(given)
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(None, given), strict=True))


def assert_close(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, **CLOSE, err_msg=name)


def every_layer(strategy, folder):
    """The same numbers, with tables inside of the file and beside it."""
    with strategy.scope():
        model = Everything(strategy.world_size)
    given = batch()
    strategy.run(lambda: model(given, training=True))  # statistics of the norm
    expected = strategy.run(lambda: model(given))
    for tables in ("inside", "files"):
        path = folder / tables / "model.onnx"
        path.parent.mkdir(exist_ok=True)
        tfdist_ext.export_onnx(model, path, tables=tables, inputs=given)
        if strategy.rank == 0:
            found = run(path, flat(given))
            assert_close(found, expected)
            assert list(found) == sorted(expected)
    other = batch(seed=1, samples=3)
    expected = strategy.run(lambda: model(other))
    if strategy.rank == 0:
        assert_close(run(path, flat(other)), expected)
        assert_gathers(path)


def assert_gathers(path):
    """A row is read by a Gather, and lists are summed by a ReduceSum."""
    import onnx

    model = onnx.load(str(path))
    kinds = {node.op_type for node in model.graph.node}
    assert {"Gather", "ReduceSum"} <= kinds
    assert not {"Loop", "ScatterND", "Unique", "NonZero", "If"} & kinds, kinds
    read = {
        node.input[0] for node in model.graph.node if node.op_type == "Gather"
    }
    tables = {
        each.name
        for each in model.graph.initializer
        if each.name.startswith("tables/")
    }
    assert tables <= read
    named = [
        f"{layer}_{key}" for layer in ("plain", "weighted") for key in KINDS
    ]
    assert {f"tables/{name}/values" for name in named} <= tables
    assert len(tables) == 2 * len(KINDS) + 4


def smaller_tables(strategy, folder):
    """Served rows are those of a SavedModel with tables of the same dtype."""
    with strategy.scope():
        model = Everything(strategy.world_size, "bfloat16")
    given = batch()
    strategy.run(lambda: model(given))
    for dtype in ("bfloat16", "int8"):
        tfdist_ext.export(model, folder / f"{dtype}-saved", dtype, inputs=given)
        for tables in ("inside", "files"):
            path = folder / f"{dtype}-{tables}.onnx"
            tfdist_ext.export_onnx(model, path, dtype, tables, inputs=given)
        if strategy.rank > 0:
            continue
        saved = tf.saved_model.load(str(folder / f"{dtype}-saved"))
        expected = saved.serve(given)
        for tables in ("inside", "files"):
            path = folder / f"{dtype}-{tables}.onnx"
            assert_close(run(path, flat(given)), expected)
        size = sum(
            path.stat().st_size for path in folder.glob(f"{dtype}-files.onnx.*")
        )
        rows = sum(ROWS + i for i in range(len(KINDS)))
        counts = [(2 * rows + ROWS, DIM), (2 * ROWS, 3), (ROWS, 2)]
        each = (2, 0) if dtype == "bfloat16" else (1, 4)
        assert size == sum(n * (d * each[0] + each[1]) for n, d in counts)


def functional(strategy, folder):
    """Names and order of many outputs, ids of one rank, and bad ids."""
    with strategy.scope():
        user = keras.Input([], dtype="int64", name="user")
        seen = keras.Input([2, 3], dtype="int32", name="seen")
        of_user = Embedding(ROWS, DIM, normal(1))(user)
        of_seen = FullSparse(DIM, ROWS, kernel_initializer=normal(2))(seen)
        joined = keras.layers.Concatenate()(
            [of_user, keras.layers.Flatten()(of_seen)]
        )
        model = keras.Model(
            [user, seen],
            [
                keras.layers.Dense(1, kernel_initializer=normal(i))(joined)
                for i in range(3, 15)
            ],
        )
    rng = np.random.default_rng(0)
    given = {
        "user": rng.integers(0, ROWS, [5]),
        "seen": rng.integers(0, ROWS, [5, 2, 3]).astype(np.int32),
    }
    ordered = [tf.constant(given[name]) for name in ("user", "seen")]
    expected = strategy.run(lambda: model(ordered))
    path = folder / "model.onnx"
    for _ in range(2):  # the second one replaces the first one
        tfdist_ext.export_onnx(model, path)
    if strategy.rank > 0:
        return
    found = run(path, given)
    assert list(found) == [f"output_{i}" for i in range(12)]
    for value, other in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(value, other, **CLOSE)
    for bad in (-1, -ROWS, ROWS):
        given["user"][2] = bad
        with refused(Exception, "out of data bounds"):
            run(path, given)
    assert names_in(folder) == {"model.onnx"}


def ragged(strategy, folder):
    """Lists of several lengths, also empty ones."""

    class Ragged(keras.Model):
        def __init__(self):
            super().__init__()
            self.plain = [
                FullSparse(3, ROWS, kernel_initializer=normal(1)),
                _pooled("mean", "error"),
                _pooled("sqrtn", "ignore"),
            ]

        def call(self, inputs):
            return [
                self.plain[0](inputs["seen"]),
                *(
                    layer({"of": inputs["seen"]})["of"]
                    for layer in self.plain[1:]
                ),
            ]

    def lists(values):
        return tf.ragged.constant(values, tf.int64, ragged_rank=1)

    with strategy.scope():
        model = Ragged()
    first = lists([[1, 2], [], [3, 4, 5], [7]])
    strategy.run(lambda: model({"seen": first}))
    path = folder / "model.onnx"
    tfdist_ext.export_onnx(model, path, inputs={"seen": first})
    for values in (first, lists([[], [1], []]), lists([[2, 2, 2, 2], [2]])):
        expected = strategy.run(lambda given=values: model({"seen": given}))
        if strategy.rank == 0:
            splits = values.row_splits.numpy()
            given = {
                "seen": values.flat_values.numpy(),
                "seen_row_splits": splits,
            }
            found = run(path, given)
            assert_close(
                found, {f"output_{i}": v for i, v in enumerate(expected)}
            )


def _pooled(combiner, out_of_range):
    table = TableConfig(
        combiner,
        ROWS,
        DIM,
        normal(2),
        combiner=combiner,
        out_of_range=out_of_range,
    )
    feature = FeatureConfig("of", table, (None, None), (None, DIM))
    return DistributedEmbedding({"of": feature}, name=f"of_{combiner}")


def for_triton(strategy, folder):
    """A folder of Triton's form, whose shapes are those of the model."""
    with strategy.scope():
        model = Everything(strategy.world_size)
    given = batch()
    expected = strategy.run(lambda: model(given))
    for size, tables in ((64, "inside"), (0, "files")):
        path = folder / f"ranking-{size}"
        tfdist_ext.export_onnx(
            model,
            path,
            tables=tables,
            inputs=given,
            triton_max_batch_size=size,
        )
        with refused(Exception, "a model for Triton is not replaced"):
            tfdist_ext.export_onnx(
                model, path, inputs=given, triton_max_batch_size=size
            )
        if strategy.rank > 0:
            continue
        files = names_in(path)
        assert {"config.pbtxt", "1", "1/model.onnx"} <= files
        assert len(files) == (3 if tables == "inside" else 3 + 14)
        found = run(path / "1" / "model.onnx", flat(given))
        assert_close(found, expected)
        read = parsed((path / "config.pbtxt").read_text())
        assert read["name"] == [f"ranking-{size}"]
        assert read["backend"] == ["onnxruntime"]
        assert read["max_batch_size"] == [size]
        check_tensors(read["input"], flat(given), size)
        check_tensors(read["output"], found, size)


def check_tensors(listed, arrays, max_batch_size):
    """Names, dtypes and shapes, of which the batch is not a part."""
    assert [each["name"][0] for each in listed] == sorted(arrays)
    kinds = {"int64": "TYPE_INT64", "float32": "TYPE_FP32"}
    for each in listed:
        array = arrays[each["name"][0]]
        assert each["data_type"] == [kinds[array.dtype.name]]
        shape = list(array.shape[1:])
        if max_batch_size == 0:
            shape = [-1, *shape]
        assert each["dims"] == [shape]
        assert set(each) == {"name", "data_type", "dims"}


def parsed(text):
    """Protobuf's text form: lists of values, by the names of fields."""
    tokens = re.findall(r'"[^"]*"|[{}\[\]:,]|[\w.+-]+', text)
    assert "".join(tokens) == re.sub(r"\s", "", text)
    message, rest = _message(tokens)
    assert not rest
    return message


def _message(tokens):
    found = {}
    while tokens and tokens[0] != "}":
        name, tokens = tokens[0], tokens[1:]
        assert re.fullmatch("[a-z_]+", name), name
        if tokens[0] == ":":
            tokens = tokens[1:]
        value, tokens = _value(tokens)
        found.setdefault(name, []).append(value)
    return found, tokens


def _value(tokens):
    first, tokens = tokens[0], tokens[1:]
    if first == "{":
        message, tokens = _message(tokens)
        assert tokens[0] == "}"
        return message, tokens[1:]
    if first == "[":
        end = tokens.index("]")
        assert set(tokens[1:end:2]) <= {","}
        return [int(each) for each in tokens[:end:2]], tokens[end + 1 :]
    if first.startswith('"'):
        return first[1:-1], tokens
    return int(first) if first.lstrip("-").isdigit() else first, tokens


def together(strategy):
    """Waits until all ranks have come here."""
    strategy.gather(tf.zeros([1]), 0)


def failures_of_conversion(strategy, folder):
    """All ranks learn what ONNX lacks; nothing is left, an old file stays."""
    model = trained(strategy)
    path = folder / "model.onnx"
    tfdist_ext.export_onnx(model, path)
    before = path.read_bytes()

    class Unknown(keras.Model):
        def call(self, inputs):
            return tf.math.lgamma(model(inputs)) + tf.math.digamma(1.5)

    class Looping(keras.Model):
        def call(self, inputs):
            return tf.map_fn(
                lambda ids: model(ids[tf.newaxis]),
                inputs,
                fn_output_signature=tf.float32,
            )

    with strategy.scope():
        unknown, looping = Unknown(), Looping()
    ids = np.arange(24).reshape(8, 3)
    for refused_model, texts in (
        (unknown, ["ONNX", "Lgamma", "tfdist_ext.export("]),
        (looping, ["ONNX", "tf.map_fn", "'sparse'"]),
    ):
        with refused(Exception, *texts):
            tfdist_ext.export_onnx(refused_model, path, inputs=ids)
        goes_on(strategy, model)
    together(strategy)
    assert names_in(folder) == {"model.onnx"}
    assert path.read_bytes() == before


def refusals(strategy, folder):
    """What ONNX cannot have is refused by its name, before it is written."""
    model = trained(strategy)
    export = tfdist_ext.export_onnx
    ids = np.arange(24).reshape(8, 3)
    for argument in (-1, True, 1.0):
        with refused(ValueError, "`triton_max_batch_size`", repr(argument)):
            export(model, folder / "m.onnx", triton_max_batch_size=argument)
    for texts, save in (
        (["int4"], lambda p: export(model, p, "int4")),
        (["outside"], lambda p: export(model, p, tables="outside")),
        (["keras.Sequential"], lambda p: export(model.layers[0], p)),
        (["`path`", "gs://"], lambda p: export(model, f"gs://b/{p}")),
        (["`path`"], lambda p: export(model, f"{p}/")),
    ):
        with refused(ValueError, *texts):
            save(str(folder / "model.onnx"))
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    with _packages(), refused(Exception, "is a folder", "blocked/model.onnx"):
        export(model, blocked)
    # The table has 640 bytes, other weights have 36.
    for largest, tables, texts in (
        (500, "inside", ["676 bytes", "have 500", "tables='files'"]),
        (30, "files", ["without tables have 36 bytes", "allows 30"]),
    ):
        with (
            mock.patch.object(onnx_files, "LARGEST", largest),
            refused(Exception, *texts),
        ):
            export(model, folder / "m.onnx", tables=tables)
    for refused_model, given, texts in _models(strategy, ids):
        with refused(Exception, *texts):
            export(refused_model, folder / "m.onnx", inputs=given)
        together(strategy)
    with (
        mock.patch.dict(sys.modules, {"tf2onnx": None}),
        refused(Exception, "pip install tf2onnx onnx"),
    ):
        export(model, folder / "m.onnx")
    goes_on(strategy, model)
    together(strategy)
    assert names_in(folder) == {"blocked"}


def _packages():
    """As if the packages were installed; nothing is converted by them."""
    fakes = {name: mock.Mock() for name in ("onnx", "tf2onnx")}
    return mock.patch.dict(sys.modules, fakes)


def _models(strategy, ids):
    """Models that are refused, their inputs, and what the errors say."""

    class Calling(keras.Model):
        def __init__(self, work, layers=(), names=("taken", "made")):
            super().__init__()
            self.work, self.inner, self.keys = work, list(layers), names

        def call(self, inputs):
            return {self.keys[1]: self.work(inputs[self.keys[0]])}

    def growing(key_dtype, given):
        table = TableConfig(
            "grown",
            embedding_dim=DIM,
            vocabulary=DynamicVocabulary(50, key_dtype=key_dtype),
        )
        feature = FeatureConfig("f", table, (None, 3), (None, DIM))
        layer = DistributedEmbedding({"f": feature})
        strategy.run(layer, args=({"f": tf.constant(given)},))
        return lambda given: layer({"f": given})["f"], [layer]

    texts = tf.strings.as_string(ids)
    floats = ids.astype(np.float32)
    with strategy.scope():
        lookup = keras.layers.IntegerLookup(vocabulary=[3, 5, 7])
        half = keras.layers.Dense(2, dtype="mixed_bfloat16")
        found = [
            (growing("int64", ids), ids, ["['grown']", "dynamic vocabularies"]),
            (
                growing("string", texts),
                texts,
                ["['grown']", "dynamic vocabularies"],
            ),
            ((tf.strings.length,), texts, ["takes strings (['taken'])"]),
            ((lookup, [lookup]), ids, ["HashTable"]),
            ((half, [half]), floats, ["bfloat16", "MatMul", "'float32'"]),
        ]
        for arguments, given, said in found:
            model = Calling(*arguments)
            yield model, {"taken": given}, [*said, "tfdist_ext.export("]
        same = Calling(keras.layers.Dense(2), names=("one", "one"))
        yield same, {"one": floats}, ["['one']", "inputs and outputs"]
