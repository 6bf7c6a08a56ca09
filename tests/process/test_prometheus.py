# SPDX-License-Identifier: Apache-2.0
"""Endpoints for Prometheus, and the dashboard that reads them."""

import json
import pathlib
import re
import socket

import pytest

pytestmark = pytest.mark.process

ROOT = pathlib.Path(__file__).parents[2]
DASHBOARD = ROOT / "examples" / "monitoring" / "grafana.json"
# Of other modes of `consistency`.
OTHERS = {"tfdist_stale_updates_total", "tfdist_held_back_ratio"}


def free_ports(count):
    """The first of some consecutive ports that are free now."""
    for base in range(21000, 32000, 7):
        sockets = []
        try:
            for port in range(base, base + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return base
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise AssertionError("no free ports")


def samples_of(text):
    """Values by name and labels, read by Prometheus's own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def queried():
    """Names of metrics and of labels in the dashboard's queries."""
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    ]
    queries += [each["query"] for each in dashboard["templating"]["list"]]
    text = " ".join(queries)
    legends = re.findall(r"{{(\w+)}}", DASHBOARD.read_text())
    groups = re.findall(r"by \((\w+)\)", text)
    return set(re.findall(r"tfdist_\w+", text)), {*legends, *groups}


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3), (2, 2), (1, 3), (4, 3)])
def test_every_rank_serves_its_numbers(run_scenario, ranks, keras):
    pytest.importorskip("prometheus_client", reason="an optional package")
    base = free_ports(ranks)
    found = run_scenario(
        "prometheus_scenarios.served", base, ranks=ranks, keras=keras
    )
    assert [port for _, port, *_ in found] == [base + i for i in range(ranks)]
    for rank, (text, _, losses, statistics, scrapes) in enumerate(found):
        assert scrapes == 4  # two steps at a time
        values = samples_of(text)
        mine = ("rank", str(rank))

        def value(name, *labels, values=values, mine=mine):
            return values[name, frozenset([mine, *labels])]

        assert value("tfdist_steps_total") == 8
        assert value("tfdist_epochs_total") == 2
        assert value("tfdist_learning_rate") == 0.25
        assert value("tfdist_resident_memory_bytes") > 1e7
        assert {"loss", "val_accuracy"} <= losses.keys()
        for name, loss in losses.items():
            assert value("tfdist_log", ("name", name)) == pytest.approx(loss)
        if ranks == 1:
            continue
        assert 0 < value("tfdist_sent_bytes_total") <= statistics["bytes_sent"]
        calls, sent, _ = statistics["labels"]["gradients"]
        label = ("label", "gradients")
        assert value("tfdist_exchange_calls_total", label) == calls
        assert value("tfdist_exchange_sent_bytes_total", label) == sent
        waited = ("for_rank", str((rank + 1) % ranks))
        assert value("tfdist_waited_seconds_total", waited) >= 0
        assert value("tfdist_batch_share") == pytest.approx(1 / ranks)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_the_dashboard_asks_for_what_is_served(run_scenario, ranks, keras):
    """All names and labels of its queries exist, and none is left out."""
    pytest.importorskip("prometheus_client", reason="an optional package")
    from tfdist_ext.callbacks import prometheus

    ending = {"counter": "_total", "gauge": ""}
    every = {
        name + ending[kind] for name, (kind, *_) in prometheus.METRICS.items()
    }
    names, labels = queried()
    assert names == every
    text, *_ = run_scenario(
        "prometheus_scenarios.served", 0, ranks=ranks, keras=keras
    )[0]
    served = samples_of(text)
    assert {name for name, _ in served} == every - OTHERS
    known = {label for _, pairs in served for label, _ in pairs}
    assert labels <= known | {"steps_old", "of"}
    described = (ROOT / "docs" / "monitoring.md").read_text()
    assert all(f"`{name}`" in described for name in every)


@pytest.mark.parametrize(("ranks", "keras"), [(2, 3)])
def test_a_port_in_use_is_an_error_that_names_it(run_scenario, ranks, keras):
    pytest.importorskip("prometheus_client", reason="an optional package")
    base = free_ports(ranks)
    for text in run_scenario(
        "prometheus_scenarios.one_port_is_taken", base, ranks=ranks, keras=keras
    ):
        assert re.search(rf"127\.0\.0\.1:{base}|127\.0\.0\.1:{base + 1}", text)
