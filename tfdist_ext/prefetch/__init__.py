# SPDX-License-Identifier: Apache-2.0
"""Ids of the next batch, exchanged during a step."""
