# SPDX-License-Identifier: Apache-2.0
"""How processes of one job find each other, and keep strangers out."""
