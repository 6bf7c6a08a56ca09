# SPDX-License-Identifier: Apache-2.0
"""What a machine can do, measured by one process."""

import tfdist_ext
from tfdist_ext.tables.plan import plan
from tfdist_ext.tables.problem import Machine
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig


def test_one_process_measures_its_memory():
    machine = tfdist_ext.measure_machine()
    assert machine.link_bytes_per_second == 150e6  # it has no link
    # No memory is as slow, nor as fast, as that.
    assert 1e7 < machine.read_bytes_per_second < 1e12
    assert machine.cores >= 1
    assert "rows read at" in str(machine)


def test_plans_take_what_was_measured():
    table = TableConfig("table", 10**6, 64, combiner="sum")
    feature = FeatureConfig("feature", table, (None, 20), (None, 64))
    machine = Machine(1e9, 16e9, 4)
    made = plan([table], [feature], 4, **machine.speeds())
    setting = made.problem.setting
    assert setting.link_bytes_per_second == 1e9
    assert setting.read_bytes_per_second == 16e9
    usual = plan([table], [feature], 4)
    assert made.seconds_per_step < usual.seconds_per_step
