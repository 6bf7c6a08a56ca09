# SPDX-License-Identifier: Apache-2.0
"""Tables and their parts as plain data."""
