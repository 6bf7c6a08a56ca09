# SPDX-License-Identifier: Apache-2.0
"""SavedModels of plain TensorFlow ops, and what keeps them up to date."""
