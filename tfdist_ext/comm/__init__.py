# SPDX-License-Identifier: Apache-2.0
"""Connections between ranks, and exchanges over them."""
