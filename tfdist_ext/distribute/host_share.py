# SPDX-License-Identifier: Apache-2.0
"""What of its host a rank uses that another launcher has started.

`tfdist-run` says it by variables, before TensorFlow is loaded; other launchers
leave all of the host to each of their processes, unless they are told.
"""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from tfdist_ext.launcher.launched import Launched

_LOG = logging.getLogger(__name__)
_THREADS = "TF_NUM_INTRAOP_THREADS"


def take(launched: Launched) -> None:
    """Takes a GPU and a share of the cores where nobody has chosen any.

    Args:
        launched: this rank. Alone on its host it takes all.
    """
    if launched.local_size == 1:
        return
    try:
        _take_gpu(launched)
        _take_cores(launched)
    except RuntimeError as error:  # TensorFlow has started its devices
        _LOG.warning(
            "tfdist_ext: rank %d cannot take its share of GPUs and cores, "
            "which %d ranks of this host use (%s). Create the strategy before "
            "the first tensor, or set CUDA_VISIBLE_DEVICES and %s.",
            launched.rank,
            launched.local_size,
            error,
            _THREADS,
        )


def _take_gpu(launched: Launched) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    all_visible = tf.config.get_visible_devices("GPU") == gpus
    if all_visible and len(gpus) >= launched.local_size:
        tf.config.set_visible_devices(gpus[launched.local_rank], "GPU")


def _take_cores(launched: Launched) -> None:
    threading = tf.config.threading
    chosen = os.environ.get(_THREADS)
    if chosen or threading.get_intra_op_parallelism_threads():
        return
    cores = len(os.sched_getaffinity(0))
    # A launcher that binds its processes has shared the cores already.
    if cores == os.cpu_count():
        share = max(1, cores // launched.local_size)
        threading.set_intra_op_parallelism_threads(share)
