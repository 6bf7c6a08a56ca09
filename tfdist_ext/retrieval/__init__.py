# SPDX-License-Identifier: Apache-2.0
"""The best of all candidates, each scored by the rank that has it."""
