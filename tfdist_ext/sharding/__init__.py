# SPDX-License-Identifier: Apache-2.0
"""This rank's parts of tables, as variables."""
