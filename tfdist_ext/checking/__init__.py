# SPDX-License-Identifier: Apache-2.0
"""Whether ranks train what one process trains, and whether they stay equal."""
