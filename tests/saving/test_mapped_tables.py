# SPDX-License-Identifier: Apache-2.0
"""Tables of exported models that are files."""

import numpy as np
import tensorflow as tf

import tfdist_ext
from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import TableConfig

keras = tf.keras


def test_tables_with_similar_names_have_files_of_their_own(tmp_path):
    names = ("a b", "a_b", "a:b", "ä-b")
    layer = DistributedEmbedding(
        {
            name: FeatureConfig(
                name,
                TableConfig(name, 10, 4, keras.initializers.Constant(number)),
                (None, 2),
                (None, 4),
            )
            for number, name in enumerate(names)
        }
    )
    ids = {f"f{n}": keras.Input([2], dtype="int64") for n in range(len(names))}
    given = {name: ids[f"f{n}"] for n, name in enumerate(names)}
    model = keras.Model(ids, list(layer(given).values()))
    tfdist_ext.export(model, tmp_path / "served", tables="files")
    assert len(list((tmp_path / "served").glob("**/*.values"))) == len(names)
    served = tf.saved_model.load(str(tmp_path / "served"))
    batch = {name: tf.constant([[1, 2], [3, 4]], tf.int64) for name in ids}
    expected = model.predict(batch, verbose=0)
    for found, wanted in zip(served.serve(batch), expected, strict=True):
        np.testing.assert_allclose(found, wanted)
    assert {float(each[0, 0]) for each in expected} == {0.0, 1.0, 2.0, 3.0}
