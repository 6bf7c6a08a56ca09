# SPDX-License-Identifier: Apache-2.0
"""Traces of all ranks on one clock, and what they say. No TensorFlow."""
