# SPDX-License-Identifier: Apache-2.0
"""A model of every layer, every kind of input and every placement."""

import numpy as np
import tensorflow as tf

from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import DynamicVocabulary
from tfdist_ext.layers import Embedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import SharedExchange
from tfdist_ext.layers import TableConfig
from tfdist_ext.tables.placement import TablePlacement

keras = tf.keras
BATCH, ROWS, DIM = 6, 37, 4


def normal(seed):
    return keras.initializers.RandomNormal(0.0, 0.3, seed=seed)


# Of features: the combiner, how ids come, ids per sample.
KINDS = {
    "dense": ("mean", (5,)),
    "sparse": ("sqrtn", (9,)),
    "ragged": ("sum", (None,)),
    "kept": (None, (None,)),
    "one": ("mean", ()),
}


def embedding(ranks, dtype="float32"):
    """Every combiner, every kind of ids and, in turn, every placement."""
    places = [
        TablePlacement.row_wise(ranks),
        TablePlacement.column_wise(ranks),
        TablePlacement.table_wise(ranks - 1),
        TablePlacement.row_wise(ranks, deduplicate=True),
        TablePlacement.data_parallel(),
    ]
    features = {}
    for place, (name, (combiner, shape)) in zip(
        places, KINDS.items(), strict=True
    ):
        table = TableConfig(
            f"of_{name}",
            ROWS + len(features),
            DIM,
            normal(len(features)),
            combiner=combiner,
            placement=place if ranks > 1 else "data_parallel",
            dtype=dtype,
            out_of_range="ignore" if name == "dense" else "error",
        )
        kept = shape if combiner is None else ()
        features[name] = FeatureConfig(
            name, table, (None, *shape), (None, *kept, DIM)
        )
    return DistributedEmbedding(features, name="embedding")


class Everything(keras.Model):
    """Results of all layers as they are, so that differences show."""

    def __init__(self, ranks, dtype="float32"):
        super().__init__()
        self.embedding = embedding(ranks, dtype)
        self.wide = FullSparse(
            3, ROWS, "relu", kernel_initializer=normal(11), name="wide"
        )
        self.pair = [
            FullSparse(2, ROWS, kernel_initializer=normal(12), name="left"),
            FullSparse(3, ROWS, kernel_initializer=normal(13), name="right"),
        ]
        self.shared = SharedExchange(self.pair)
        self.items = Embedding(ROWS, DIM, normal(14), mask_zero=True)
        self.words = keras.layers.StringLookup(vocabulary=["a", "b"])

    def call(self, inputs):
        found = dict(self.embedding(inputs["ids"], inputs["weights"]))
        found["wide"] = self.wide(inputs["matrix"])
        found["left"], found["right"] = self.shared(
            [inputs["matrix"], inputs["ids"]["ragged"]]
        )
        found["items"] = self.items(inputs["ids"]["dense"] % ROWS)
        found["words"] = self.items(self.words(inputs["words"]))
        return found


class Growing(keras.Model):
    """Ids as keys of vocabularies that grow, some of them as texts.

    Args:
        vocabularies: by the name of the table; None for two without eviction.
    """

    def __init__(self, vocabularies=None):
        super().__init__()
        features = {}
        self.vocabularies = vocabularies or {
            "numbers": DynamicVocabulary(100, 2),
            "texts": DynamicVocabulary(100, 2, key_dtype="string"),
        }
        for name, vocabulary in self.vocabularies.items():
            table = TableConfig(
                name,
                embedding_dim=DIM,
                initializer=normal(len(features)),
                vocabulary=vocabulary,
            )
            features[name] = FeatureConfig(name, table, (None, 3), (None, DIM))
        self.embedding = DistributedEmbedding(features, name="embedding")
        self.top = keras.layers.Dense(1, kernel_initializer=normal(21))

    def call(self, ids):
        keys = {
            name: ids - 9
            if vocabulary.key_dtype == "int64"
            else tf.strings.as_string(ids)
            for name, vocabulary in self.vocabularies.items()
        }
        found = self.embedding(keys)
        return self.top(tf.concat([found[name] for name in keys], 1))


class InBuckets(DynamicVocabulary):
    """Of few keys all the same, so that every rank owns some."""

    buckets = 2


def short_lived():
    """Vocabularies whose keys are evicted, expire or find no row."""
    return {
        "oldest": InBuckets(16, evict="lru"),
        "rarest": InBuckets(
            12,
            evict="lfu",
            key_dtype="string",
            full="shared_row",
            keep_text=True,
        ),
        "expiring": InBuckets(60, steps_to_live=1, full="shared_row"),
        "full": InBuckets(12, full="shared_row"),
        "waiting": InBuckets(12, 2, key_dtype="string", full="shared_row"),
    }


def batch(seed=0):
    """A batch of every kind of ids, with weights."""
    rng = np.random.default_rng(seed)
    splits = np.concatenate([[0], np.cumsum(rng.integers(0, 4, BATCH))])
    cells = np.flatnonzero(rng.random(BATCH * 9) < 0.3)
    where = np.stack(np.divmod(cells, 9), 1)

    def of_every_kind(values):
        def ragged():
            return tf.RaggedTensor.from_row_splits(values(splits[-1]), splits)

        flat = values(len(cells))
        return {
            "dense": tf.constant(values([BATCH, 5])),
            "sparse": tf.SparseTensor(where, flat, [BATCH, 9]),
            "ragged": ragged(),
            "kept": ragged(),
            "one": tf.constant(values([BATCH])),
        }

    ids = of_every_kind(lambda shape: rng.integers(0, ROWS, shape))
    # Of a table that ignores ids out of range.
    ids["dense"] += ROWS * tf.constant([[0, 0, 0, 0, 1]], tf.int64)
    matrix = rng.random([BATCH, ROWS]) * (rng.random([BATCH, ROWS]) < 0.2)
    return {
        "ids": ids,
        "weights": of_every_kind(
            lambda shape: rng.random(shape).astype(np.float32)
        ),
        "words": tf.constant(list("abcabc")),
        "matrix": tf.sparse.from_dense(matrix.astype(np.float32)),
    }
