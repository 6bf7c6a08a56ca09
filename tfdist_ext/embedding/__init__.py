# SPDX-License-Identifier: Apache-2.0
"""The stages of a lookup in partitioned tables."""
