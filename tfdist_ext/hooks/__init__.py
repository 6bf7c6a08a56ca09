# SPDX-License-Identifier: Apache-2.0
"""Table of the attributes of TensorFlow and Keras that are replaced."""
