# SPDX-License-Identifier: Apache-2.0
"""Keras's files of models whose tables are partitioned."""
