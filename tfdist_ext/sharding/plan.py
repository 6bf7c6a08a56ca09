# SPDX-License-Identifier: Apache-2.0
"""Sharding plans: kept for programs that import them from here."""

from tfdist_ext.planner.plan import ShardingPlan
from tfdist_ext.planner.plan import plan

__all__ = ["ShardingPlan", "plan"]
