# SPDX-License-Identifier: Apache-2.0
"""The strategy, on top of all the others."""
