# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program, on one host or several; no TensorFlow."""
