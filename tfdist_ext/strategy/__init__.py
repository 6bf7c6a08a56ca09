# SPDX-License-Identifier: Apache-2.0
"""The strategy, and the functions that Keras's loops call under it."""
