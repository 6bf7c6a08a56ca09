# SPDX-License-Identifier: Apache-2.0
"""Runs published programs: as ports on several ranks, and as they are."""

import contextlib
import importlib

import numpy as np
import retrieval_cases
import tensorflow as tf
from retrieval_models import DIM

import tfdist_ext
from tfdist_ext.keras_internals import KERAS_3

keras = tf.keras
KERAS_RS = ("DistributedEmbedding", "TableConfig", "FeatureConfig")


def program(case):
    """A function of what a port changes."""
    module, name = case.split("/")
    return importlib.import_module(f"{module}_programs").PROGRAMS[name]


def results(case, parts, tables, table):
    """What a program finds, and its tables."""
    model, found = program(case)(parts)
    found = {name: np.array(value) for name, value in found.items()}
    for name, layer in tables.items():
        found[f"table/{name}"] = table(layer)
    if distributed := getattr(model, "embedding_layer", None):
        for name, rows in distributed.get_embedding_tables().items():
            found[f"table/{name}"] = np.array(rows)
    return found


def in_one_process(strategy, case, folder):
    """A program as it was published, and its port on one rank."""
    as_published = published(strategy, case, folder)
    keras.backend.clear_session()
    alone = tfdist_ext.HybridParallelStrategy()
    return as_published, ported(alone, case, folder)


def save(model, folder):
    """Saves a model, on all ranks; the folder, for each of them."""
    path = str(folder / "served")
    tf.saved_model.save(model, path)
    return path


def of_tower(movies, model):
    """Candidates as a port has them, which a tower computes."""
    names = tf.data.Dataset.from_tensor_slices(movies).batch(128)
    return tf.data.Dataset.zip((names, names.map(model)))


def ported(strategy, case, folder):
    """A port, on our strategy."""
    tables = {}
    parts = retrieval_cases.ported(tables, "auto")
    parts.scope = strategy.scope
    parts.of_tower = of_tower
    parts.save = lambda model: save(model, folder)
    parts.rule = lambda rule: rule
    parts.fixed = fixed(tfdist_ext.layers.Embedding)
    parts.of_all_ranks = {"synchronized": True}
    parts.placement = "sparsecore"
    parts.start = start
    for name in KERAS_RS:
        setattr(parts, name, getattr(tfdist_ext.layers, name))
    parts.rule_with_tables = tfdist_ext.optimizers.Adagrad
    return results(case, parts, tables, strategy.gather_table)


def published(strategy, case, folder):
    """A program as it was published, in one process."""
    tables = {}
    parts = retrieval_cases.published(tables)
    parts.scope = contextlib.nullcontext
    parts.of_tower = parts.candidates
    parts.save = lambda model: save(model, folder)
    parts.rule = of_sums
    parts.fixed = fixed(keras.layers.Embedding)
    parts.of_all_ranks = {}
    parts.placement = "auto"  # it has no other without TPUs
    parts.start = start
    if KERAS_3:
        import keras_rs

        for name in KERAS_RS:
            setattr(parts, name, getattr(keras_rs.layers, name))

    def rule_with_tables(rate):
        return of_sums(keras.optimizers.Adagrad(rate))

    parts.rule_with_tables = rule_with_tables

    def table(layer):
        return np.array(layer.embeddings)

    return results(case, parts, tables, table)


def fixed(kind):
    """A table that is given, and not trained."""

    def make(name, matrix):
        initializer = keras.initializers.Constant(matrix)
        return kind(
            *matrix.shape,
            embeddings_initializer=initializer,
            trainable=False,
            name=name,
        )

    return make


def start(name, rows):
    """What a table starts from."""
    matrix = retrieval_cases.first_rows(name, rows, DIM)
    return keras.initializers.Constant(matrix)


def of_sums(rule):
    """Lets a rule of Keras 3 take the sum of what a row is told twice.

    It takes the squares of the parts, where tf_keras and ours take the sum's.
    """
    if KERAS_3:
        apply = rule.apply

        def of_dense(gradients, variables=None):
            return apply(list(map(tf.convert_to_tensor, gradients)), variables)

        rule.apply = of_dense
    return rule
