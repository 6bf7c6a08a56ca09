# SPDX-License-Identifier: Apache-2.0
"""Placements of tables: kept for programs that import them from here."""

from tfdist_ext.tables.placement import TablePlacement

__all__ = ["TablePlacement"]
