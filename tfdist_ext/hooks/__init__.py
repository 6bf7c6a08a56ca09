# SPDX-License-Identifier: Apache-2.0
"""The attributes of TensorFlow and Keras that this package replaces."""
