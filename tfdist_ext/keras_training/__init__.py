# SPDX-License-Identifier: Apache-2.0
"""What the strategy changes in Keras's `fit`, `evaluate`, `predict`."""
