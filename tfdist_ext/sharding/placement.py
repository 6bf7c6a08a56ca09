# SPDX-License-Identifier: Apache-2.0
"""The rows of a part: kept for programs that import them from here."""

from tfdist_ext.tables.rotated_mod import ids_of_part
from tfdist_ext.tables.rotated_mod import local_row
from tfdist_ext.tables.rotated_mod import part_of

__all__ = ["ids_of_part", "local_row", "part_of"]
