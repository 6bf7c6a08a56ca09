# SPDX-License-Identifier: Apache-2.0
"""How many damaged inputs a test tries: few in CI, many in `make fuzz`."""

import os


def inputs(usual: int, parts: int) -> int:
    """Inputs of one of so many equal parts of a test.

    Args:
        usual: inputs of all parts, unless TFDIST_FUZZ_INPUTS says a number.
        parts: items, or messages of an item, that they are divided by.
    """
    return int(os.environ.get("TFDIST_FUZZ_INPUTS", usual)) // parts
