# SPDX-License-Identifier: Apache-2.0
"""Makes `toy_problem` importable by the tests of this folder."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
