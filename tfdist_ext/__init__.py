# SPDX-License-Identifier: Apache-2.0
"""Model-parallel sparse layers for TensorFlow, trained with Keras `fit`."""

__all__: list[str] = []
