# SPDX-License-Identifier: Apache-2.0
"""Readers of the examples' input formats and generators of stand-in files."""
