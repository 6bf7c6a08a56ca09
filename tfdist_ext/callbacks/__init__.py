# SPDX-License-Identifier: Apache-2.0
"""Callbacks for Keras's `fit` on one rank or many."""

from tfdist_ext.callbacks.embedding_monitor import EmbeddingMonitor
from tfdist_ext.callbacks.nan_guard import NanGuard
from tfdist_ext.callbacks.prometheus import Prometheus
from tfdist_ext.callbacks.resume import Resume
from tfdist_ext.callbacks.timeline import Timeline

__all__ = ["EmbeddingMonitor", "NanGuard", "Prometheus", "Resume", "Timeline"]
