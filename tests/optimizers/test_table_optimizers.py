# SPDX-License-Identifier: Apache-2.0
"""Optimizers of single tables: what is refused, and why."""

import pytest
import tensorflow as tf

from tfdist_ext import optimizers
from tfdist_ext.keras_internals import KERAS_3
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

keras = tf.keras


def model_of(table):
    layer = DistributedEmbedding(
        FeatureConfig("f", table, (None, 2), (None, 4))
    )
    model = keras.Sequential([keras.Input([2], dtype="int64"), layer])
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 1.0},
        {"global_clipnorm": 1.0},
        {"clipvalue": 1.0},
        {"weight_decay": 0.1},
        {"use_ema": True},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("kind", [optimizers.SGD, keras.optimizers.SGD])
def test_options_of_the_whole_model_are_refused(kind, options):
    table = TableConfig("users", 20, 4, optimizer=kind(0.1, **options))
    with pytest.raises(ValueError, match=f"'users'.*{next(iter(options))}"):
        model_of(table)


def test_an_optimizer_trains_the_tables_of_one_model():
    table = TableConfig("users", 20, 4, optimizer=optimizers.Adagrad(0.1))
    for time in ("first", "second"):
        model = model_of(table)
        optimizer = optimizers.Adagrad(0.1)
        if time == "first":
            optimizer.build(model.trainable_variables)
            continue
        with pytest.raises(ValueError, match="belongs to another model"):
            optimizer.build(model.trainable_variables)


def test_what_needs_all_slots_is_refused_beside_a_table_of_its_own():
    table = TableConfig("users", 20, 4, optimizer="sgd")
    model = model_of(table)
    option = "gradient_accumulation_steps" if KERAS_3 else "use_ema"
    optimizer = optimizers.Adagrad(0.1, **{option: 2})
    with pytest.raises(ValueError, match=option):
        optimizer.build(model.trainable_variables)


@pytest.mark.parametrize("unknown", ["nadam", keras.optimizers.Nadam(0.1)])
def test_other_optimizers_are_refused(unknown):
    table = TableConfig("users", 20, 4, optimizer=unknown)
    with pytest.raises(ValueError, match=r"'users'.*Adagrad.*Received.*adam"):
        model_of(table)
