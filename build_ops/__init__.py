# SPDX-License-Identifier: Apache-2.0
"""What setup.py needs to compile `custom_ops/`; not part of the package."""
