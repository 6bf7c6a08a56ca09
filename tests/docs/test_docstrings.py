# SPDX-License-Identifier: Apache-2.0
"""Examples in doc-strings of the package do what they show."""

import doctest
import importlib

import pytest
import tensorflow as tf

from tests.docs import blocks

MODULES = sorted(
    str(path.relative_to(blocks.ROOT).with_suffix("")).replace("/", ".")
    for path in (blocks.ROOT / "tfdist_ext").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    done = doctest.testmod(module, extraglobs={"tf": tf})
    assert done.attempted > 0
    assert done.failed == 0, "see the captured output"


def test_examples_are_found():
    assert len(MODULES) >= 4
