# SPDX-License-Identifier: Apache-2.0
"""Models of two published libraries, DeepCTR and RecLearn, as they are.

Both are written for tf_keras. With tables, the `Embedding` that the library's
modules import is replaced by ours, as a user replaces that import.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.numbers.registry import WARNED
from tests.numbers.registry import program

keras = tf.keras
FIELDS = {"user": 12, "item": 20, "place": 7}
LENGTH, DIM, NEGATIVES = 5, 4, 3
# `tf.nn.conv1d` fails without samples, with oneDNN, as in one process.
WITH_CONV1D = ("deepctr/xDeepFM", "reclearn/xDeepFM")


def ranking():
    """What a model of one output is compiled with."""
    return {
        "loss": keras.losses.binary_crossentropy,
        "metrics": lambda: [keras.metrics.AUC()],
        "optimizer": lambda: keras.optimizers.Adagrad(0.1),
    }


def library_program(name, embeddings, make, **how):
    """Registers a model of a library.

    Args:
        name: "library/model", as the library spells it.
        embeddings: the module whose `Embedding` makes the tables, if any.
        make: a function of a `Context` that returns a model and its data, and
            perhaps what else `Context.train` takes.
        **how: of `program`.
    """
    library, _, model_name = name.partition("/")

    def run(c):
        load(library)
        with c.scope(), contextlib.ExitStack() as stack:
            if c.tables:
                stack.enter_context(
                    mock.patch(f"{embeddings}.Embedding", tables_of(c))
                )
            model, data, *more = make(c)
            start(model, data, c)
        return c.train(model, data, **(more[0] if more else {}))

    run.__doc__ = f"{model_name} of {library}."
    how = {"kerases": (2,), "sizes": (1, 2, 4), "needs": library} | how
    if name in WITH_CONV1D:
        how["batches"] = ("even",)
    program(name, **how)(run)


def load(library):
    """Imports a library.

    A model of RecLearn that is not used here needs pandas and tqdm.
    """
    absent = [name for name in ("pandas", "tqdm") if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent, mock.MagicMock()))
    try:
        importlib.import_module(f"{library}.models")
        if library == "reclearn":
            importlib.import_module("reclearn.models.matching")
    finally:
        for name in absent:
            del sys.modules[name]


def tables_of(c):
    """What a library calls instead of Keras's `Embedding`."""

    def make(input_dim, output_dim, input_length=None, **how):
        # A table's regularizer is of the rows that a batch looks up.
        for name in ("embeddings_initializer", "embeddings_regularizer"):
            how.pop(name, None)
        return c.embedding(input_dim, output_dim, **how)

    return make


def start(model, data, c):
    """Gives all weights but tables values that every process has."""
    model(next(iter(data))[0])  # creates the weights
    for number, weight in enumerate(c.plain_weights(model)):
        if "variance" not in weight.name:
            weight.assign(0.3 * c.normal(*weight.shape, seed=200 + number))


def deepctr_columns(c):
    """Columns of DeepCTR and their data: ids, a number, a sequence."""
    from deepctr import feature_column

    fields = [
        feature_column.SparseFeat(name, rows, embedding_dim=DIM)
        for name, rows in FIELDS.items()
    ]
    x = {
        name: c.integers(rows, c.samples, 1, seed=number)
        for number, (name, rows) in enumerate(FIELDS.items())
    }
    x["price"] = c.normal(c.samples, 1, seed=5)
    return [*fields, feature_column.DenseFeat("price", 1)], x


def deepctr_ranking(name, **how):
    """A model of one output over columns."""

    def make(c):
        from deepctr import models

        columns, x = deepctr_columns(c)
        given = {
            "dnn_hidden_units": (8, 4),
            "linear_feature_columns": columns,
            "dnn_feature_columns": columns,
        }
        model = getattr(models, name)(**given, **how)
        return model, c.batched((x, c.labels(1, "binary"))), ranking()

    library_program(f"deepctr/{name}", "deepctr.inputs", make)


deepctr_ranking("WDL")
deepctr_ranking("DeepFM")
deepctr_ranking("xDeepFM", cin_layer_size=(4, 4))
deepctr_ranking("DCN")
deepctr_ranking("NFM")
deepctr_ranking("AutoInt")
deepctr_ranking("FiBiNET")


def deepctr_tasks(name):
    """A model of two outputs."""

    def make(c):
        from deepctr import models

        columns, x = deepctr_columns(c)
        model = getattr(models, name)(columns, tower_dnn_hidden_units=(4,))
        labels = c.labels(2, "binary")
        data = c.batched((x, (labels[:, :1], labels[:, 1:])))
        return model, data, {"loss": ["binary_crossentropy"] * 2}

    library_program(f"deepctr/{name}", "deepctr.inputs", make)


deepctr_tasks("MMOE")
deepctr_tasks("ESMM")
deepctr_tasks("PLE")


def deepctr_sequence(name, **how):
    """A model over the items that a user has seen."""

    def make(c):
        from deepctr import feature_column
        from deepctr import models

        columns, x = deepctr_columns(c)
        seen = feature_column.SparseFeat(
            "hist_item", FIELDS["item"], DIM, embedding_name="item"
        )
        columns.append(
            feature_column.VarLenSparseFeat(
                seen, maxlen=LENGTH, length_name="seq_length"
            )
        )
        x["seq_length"] = c.integers(LENGTH, c.samples, 1, seed=6) + 1
        x["hist_item"] = sequences(c, x["seq_length"])
        model = getattr(models, name)(
            columns, ["item"], dnn_hidden_units=(8, 4), **how
        )
        data = c.batched((x, c.labels(1, "binary")))
        return model, data, {"loss": "binary_crossentropy"}

    library_program(f"deepctr/{name}", "deepctr.inputs", make)


def sequences(c, lengths):
    """Ids of items, padded with zeros at the end."""
    ids = c.integers(FIELDS["item"] - 1, c.samples, LENGTH, seed=7) + 1
    return np.where(np.arange(LENGTH) < lengths, ids, 0)


deepctr_sequence("DIN", att_activation="sigmoid")
deepctr_sequence("BST", att_head_num=2)


def reclearn_ranking(name, module, **how):
    """A model over one id of each field."""

    def make(c):
        from reclearn.models import ranking as models

        columns = [
            {"feat_name": field, "feat_num": rows, "embed_dim": DIM}
            for field, rows in FIELDS.items()
        ]
        x = {
            field: c.integers(rows, c.samples, seed=number)
            for number, (field, rows) in enumerate(FIELDS.items())
        }
        model = getattr(models, name)(columns, **how)
        return model, c.batched((x, c.labels(1, "binary"))), ranking()

    library_program(
        f"reclearn/{name}", f"reclearn.models.ranking.{module}", make
    )


reclearn_ranking("WideDeep", "wdl", hidden_units=[8, 4])
reclearn_ranking("DeepFM", "deepfm", hidden_units=[8, 4])
reclearn_ranking("xDeepFM", "xdeepfm", hidden_units=[8], cin_size=[4, 4])
reclearn_ranking("Deep_Crossing", "deep_crossing", hidden_units=[8, 4])
reclearn_ranking("DCN", "dcn", hidden_units=[8, 4])
reclearn_ranking("AFM", "afm", mode="att")


def reclearn_matching(name, module, model_of):
    """A model that ranks an item above some that were not chosen."""

    def make(c):
        from reclearn.models import matching

        padded = sequences(c, c.integers(LENGTH, c.samples, 1, seed=6) + 1)
        items, users = FIELDS["item"], FIELDS["user"]
        x = {
            "user": c.integers(users, c.samples, seed=1),
            "click_seq": padded[:, ::-1].copy(),
            "pos_item": c.integers(items, c.samples, seed=2),
            "neg_item": c.integers(items, c.samples, NEGATIVES, seed=3),
        }
        model = model_of(getattr(matching, name))
        return model, c.batched((x,))

    library_program(
        f"reclearn/{name}", f"reclearn.models.matching.{module}", make
    )


def of_users(**how):
    return lambda kind: kind(FIELDS["user"], FIELDS["item"], DIM, **how)


def of_items(**how):
    return lambda kind: kind(FIELDS["item"], DIM, **how)


def of_sequences(**how):
    return of_items(seq_len=LENGTH, ffn_hidden_unit=DIM, **how)


reclearn_matching("BPR", "bpr", of_users())
reclearn_matching("NCF", "ncf", of_users(hidden_units=[8, 4]))
reclearn_matching("DSSM", "dssm", of_users(user_mlp=[4], item_mlp=[4]))
reclearn_matching("GRU4Rec", "gru4rec", of_items(gru_unit=DIM))
reclearn_matching("SASRec", "sasrec", of_sequences())
reclearn_matching("AttRec", "attrec", of_users())
reclearn_matching("Caser", "caser", of_users(seq_len=LENGTH, hor_n=2))
reclearn_matching("FISSA", "fissa", of_sequences())


def youtube_dnn(c):
    """Its table is a weight of the model; its negatives are drawn."""
    from reclearn.models import matching

    model = matching.YoutubeDNN(
        *(FIELDS["item"], DIM, [DIM]), neg_num=1, batch_size=4
    )
    x = {
        "click_seq": c.integers(FIELDS["item"], c.samples, LENGTH, seed=1),
        "pos_item": c.integers(FIELDS["item"], c.samples, seed=2),
        "neg_item": c.integers(FIELDS["item"], c.samples, NEGATIVES, seed=3),
    }
    return model, c.batched((x,)), {"evaluate": False}


library_program(
    *("reclearn/YoutubeDNN", "", youtube_dnn),
    verdict=WARNED,
    says="(?i)candidate",
    drawn=True,
    sizes=(2, 4),  # One process does not draw the same twice.
    tables=(False,),
)
