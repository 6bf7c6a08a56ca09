# SPDX-License-Identifier: Apache-2.0
"""Configurations of tables: for programs that import them from here."""

from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

__all__ = ["FeatureConfig", "TableConfig"]
