# SPDX-License-Identifier: Apache-2.0
"""Starts and watches the ranks of a job, without TensorFlow."""
