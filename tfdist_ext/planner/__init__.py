# SPDX-License-Identifier: Apache-2.0
"""Decides which rank holds which part of which table."""
