# SPDX-License-Identifier: Apache-2.0
"""The table of all that this package replaces in TensorFlow and Keras.

`patching` installs a row while something needs it and restores the original
afterwards. Calls go through the stages of a row in the order given, then to the
original.
"""

from __future__ import annotations

from tfdist_ext.hooks import files
from tfdist_ext.hooks import training
from tfdist_ext.patching import Hook


def table() -> list[Hook]:
    """All rows, for the Keras that is in use.

    Owners and originals are those of now: nothing is to be replaced yet.
    """
    return [*training.rows(), *files.rows()]
