# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of tfdist_ext against stock TensorFlow on limited networks."""
