# SPDX-License-Identifier: Apache-2.0
"""Starts and watches the ranks of a job, without TensorFlow."""

from tfdist_ext.launch.from_python import notebook

__all__ = ["notebook"]
