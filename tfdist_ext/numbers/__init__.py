# SPDX-License-Identifier: Apache-2.0
"""How N ranks train what one process trains, and the check of it."""
