# SPDX-License-Identifier: Apache-2.0
"""Published figures of ml-100k, reproduced at any number of ranks."""
