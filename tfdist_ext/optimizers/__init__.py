# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers with fused row updates of partitioned tables."""

from tfdist_ext.optimizers.row_clip import CowClip
from tfdist_ext.optimizers.rules import SGD
from tfdist_ext.optimizers.rules import Adagrad
from tfdist_ext.optimizers.rules import Adam
from tfdist_ext.optimizers.rules import Ftrl
from tfdist_ext.optimizers.rules import RowWiseAdagrad
from tfdist_ext.optimizers.split import Split
from tfdist_ext.optimizers.supported import element_wise

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CowClip",
    "Ftrl",
    "RowWiseAdagrad",
    "Split",
    "element_wise",
]
