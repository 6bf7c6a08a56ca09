# SPDX-License-Identifier: Apache-2.0
"""Every way of Keras to save and to load, at two ranks, under both Kerases."""

import pytest
from launching import run_ranks

pytestmark = pytest.mark.process

KERAS_3 = [
    "whole_models",
    "weights_only",
    "overwriting",
    "refusals",
    "without_tables",
    "failures",
    "callbacks",
    "backups",
]
TF_KERAS = ["refusals", "files_of_one_process", "without_tables"]


@pytest.mark.parametrize(
    ("keras", "program", "scenarios"),
    [
        (3, "files_program.py", KERAS_3),
        (2, "tf_keras_files_program.py", TF_KERAS),
    ],
    ids=["keras", "tf_keras"],
)
def test_scenarios(tmp_path, keras, program, scenarios):
    run_ranks(program, 2, tmp_path, *scenarios, keras=keras)
    for name in scenarios:
        assert all((tmp_path / f"{name}.{rank}").exists() for rank in range(2))
