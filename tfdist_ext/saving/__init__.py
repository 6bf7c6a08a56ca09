# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, Keras's files and exports of models with tables."""
