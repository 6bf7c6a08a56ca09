# SPDX-License-Identifier: Apache-2.0
"""Keras optimizers with fused row updates of partitioned tables."""

from tfdist_ext.optimizers.adagrad import Adagrad
from tfdist_ext.optimizers.adam import Adam
from tfdist_ext.optimizers.by_element import element_wise
from tfdist_ext.optimizers.ftrl import Ftrl
from tfdist_ext.optimizers.row_wise_adagrad import RowWiseAdagrad
from tfdist_ext.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Ftrl",
    "RowWiseAdagrad",
    "element_wise",
]
