# SPDX-License-Identifier: Apache-2.0
"""Metrics of recommender systems, with the Keras metric API.

Each has the value of one process at every number of ranks. Definitions follow
TorchRec's RecMetrics and RecBole's evaluator; doc-strings name the sources.
"""

from tfdist_ext.metrics.grouped import GAUC
from tfdist_ext.metrics.grouped import BucketedGAUC
from tfdist_ext.metrics.predictions import Calibration
from tfdist_ext.metrics.predictions import ExpectedCalibrationError
from tfdist_ext.metrics.predictions import NormalizedEntropy
from tfdist_ext.metrics.ranking import HitAtK
from tfdist_ext.metrics.ranking import ItemCoverageAtK
from tfdist_ext.metrics.ranking import MRRAtK
from tfdist_ext.metrics.ranking import NDCGAtK
from tfdist_ext.metrics.ranking import RecallAtK

__all__ = [
    "GAUC",
    "BucketedGAUC",
    "Calibration",
    "ExpectedCalibrationError",
    "HitAtK",
    "ItemCoverageAtK",
    "MRRAtK",
    "NDCGAtK",
    "NormalizedEntropy",
    "RecallAtK",
]
