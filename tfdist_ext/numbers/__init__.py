# SPDX-License-Identifier: Apache-2.0
"""Values of steps on several ranks equal to one process, and their check."""
