# SPDX-License-Identifier: Apache-2.0
"""AutoGraph converts what the user has written, and nothing of the package."""

import re
import tempfile

import tensorflow as tf

from tfdist_ext.layers import DistributedEmbedding
from tfdist_ext.layers import FeatureConfig
from tfdist_ext.layers import FullSparse
from tfdist_ext.layers import TableConfig


def test_only_the_users_function_is_converted(tmp_path, monkeypatch):
    # AutoGraph imports what it makes from files, which stay until the end.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    table = TableConfig("items", 10, 4)
    embedding = DistributedEmbedding(
        FeatureConfig("item", table, (None, 2), (None, 4))
    )
    sparse = FullSparse(3, 10)

    def own(ids):
        if tf.reduce_max(ids) > 8:
            ids = tf.minimum(ids, 8)
        return sparse(ids), embedding(ids)

    def prepared(ids):
        return embedding.preprocess(ids), sparse.preprocess(ids)

    batch = tf.constant([[1, 9], [0, 3]], tf.int64)
    found = tf.function(own)(batch)
    assert found[0].shape == (2, 3)
    assert len(list(tf.data.Dataset.from_tensors(batch).map(prepared))) == 1
    made = "".join(path.read_text() for path in tmp_path.glob("*.py"))
    assert set(re.findall(r"def tf__(\w+)", made)) == {"own", "prepared"}
