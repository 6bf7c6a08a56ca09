# SPDX-License-Identifier: Apache-2.0
"""The kernels for GPUs alone: built, checked and timed without TensorFlow."""
