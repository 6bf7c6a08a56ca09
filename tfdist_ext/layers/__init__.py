# SPDX-License-Identifier: Apache-2.0
"""Layers whose weights are partitioned over the ranks."""

from tfdist_ext.embedding.feature import Wire
from tfdist_ext.layers.distributed_embedding import DistributedEmbedding
from tfdist_ext.layers.embedding import Embedding
from tfdist_ext.layers.full_sparse import FullSparse
from tfdist_ext.layers.sharded_top_k import ShardedTopK
from tfdist_ext.layers.shared_exchange import SharedExchange
from tfdist_ext.tables.table_config import DynamicVocabulary
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

__all__ = [
    "DistributedEmbedding",
    "DynamicVocabulary",
    "Embedding",
    "FeatureConfig",
    "FullSparse",
    "ShardedTopK",
    "SharedExchange",
    "TableConfig",
    "Wire",
]
