# SPDX-License-Identifier: Apache-2.0
"""The configurations of tables: kept for programs that import them from here."""

from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

__all__ = ["FeatureConfig", "TableConfig"]
