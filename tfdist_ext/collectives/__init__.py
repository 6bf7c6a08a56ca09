# SPDX-License-Identifier: Apache-2.0
"""The process group, and what ranks exchange by it."""
