# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other and exchange messages."""
