# SPDX-License-Identifier: Apache-2.0
"""A global batch: its slices, and what a step makes of it."""
