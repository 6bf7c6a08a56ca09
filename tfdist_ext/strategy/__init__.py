# SPDX-License-Identifier: Apache-2.0
"""The strategy, and what Keras's loops do under it."""
