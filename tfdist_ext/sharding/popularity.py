# SPDX-License-Identifier: Apache-2.0
"""The popularity of ids: kept for programs that import it from here."""

from tfdist_ext.planner.popularity import most_frequent_ids

__all__ = ["most_frequent_ids"]
