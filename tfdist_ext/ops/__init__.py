# SPDX-License-Identifier: Apache-2.0
"""The custom ops, one wrapper each."""
