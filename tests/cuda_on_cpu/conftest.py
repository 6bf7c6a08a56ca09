# SPDX-License-Identifier: Apache-2.0
"""The ops' kernels for GPUs, built and loaded once."""

import os

import pytest


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory):
    if os.environ.get("TFDIST_LIBRARY"):
        pytest.skip("linked with the library of the package")
    from tests.cuda_on_cpu.emulated_ops import EmulatedOps  # has TensorFlow

    return EmulatedOps(tmp_path_factory.mktemp("emulated_ops"))
