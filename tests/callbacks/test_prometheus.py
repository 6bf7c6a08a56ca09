# SPDX-License-Identifier: Apache-2.0
"""Arguments of the endpoint for Prometheus."""

import sys

import pytest

from tfdist_ext.callbacks import Prometheus


@pytest.mark.parametrize("port", [True, "9470", -1, 65536])
def test_ports_that_are_none(port):
    pytest.importorskip("prometheus_client", reason="an optional package")
    with pytest.raises(ValueError, match="`port` of Prometheus"):
        Prometheus(port)


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match="pip install prometheus_client"):
        Prometheus()
