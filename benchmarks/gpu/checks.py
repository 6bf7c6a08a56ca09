# SPDX-License-Identifier: Apache-2.0
"""All cases of all kernels on one device."""

from __future__ import annotations

import types

import numpy as np

from benchmarks.gpu import check_decoding
from benchmarks.gpu import check_gradient
from benchmarks.gpu import check_lookup
from benchmarks.gpu import check_parts
from benchmarks.gpu import check_updates
from benchmarks.gpu import check_values
from benchmarks.gpu.device import Device
from benchmarks.gpu.device import DeviceError
from benchmarks.gpu.numbers import WrongResult

KERNELS: dict[str, types.ModuleType] = {
    "decoding": check_decoding,
    "lookup": check_lookup,
    "gradient": check_gradient,
    "parts": check_parts,
    "updates": check_updates,
    "values": check_values,
}


def check(device: Device, kernel: str, seed: int) -> tuple[int, list[str]]:
    """Runs every case of a kind of kernel.

    Args:
        device: where.
        kernel: one of `KERNELS`.
        seed: what the input is drawn from.

    Returns:
        How many cases there were, and what was wrong.
    """
    cases = list(KERNELS[kernel].cases(np.random.default_rng(seed)))
    wrong = []
    for index, case in enumerate(cases):
        rng = np.random.default_rng([seed, index])
        try:
            KERNELS[kernel].check(device, case, rng)
            device.release()
        except (WrongResult, DeviceError) as error:
            wrong.append(str(error))
            device.arrays.clear()
    return len(cases), wrong
