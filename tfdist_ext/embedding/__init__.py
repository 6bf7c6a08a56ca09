# SPDX-License-Identifier: Apache-2.0
"""A lookup in partitioned tables, stage by stage."""
