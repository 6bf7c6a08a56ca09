# SPDX-License-Identifier: Apache-2.0
"""TensorFlow checkpoints that all ranks write and read together."""
