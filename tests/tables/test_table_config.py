# SPDX-License-Identifier: Apache-2.0
"""Descriptions of tables and features."""

import dataclasses
import json

import numpy as np
import pytest

from tfdist_ext.tables.placement import TablePlacement
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

GRID = TablePlacement(2, 2, (3, 1, 0, 2), deduplicate=True)
TABLE = TableConfig("words", 1000, 16)
KEPT = TableConfig("kept", 1000, 16, combiner=None)


def test_arguments_of_keras_rs_may_be_passed_by_position():
    table = TableConfig(
        "words", 1000, 16, "zeros", "adam", "sum", "sparsecore", 128, 64
    )
    assert (table.initializer, table.optimizer) == ("zeros", "adam")
    assert (table.combiner, table.placement) == ("sum", "sparsecore")
    assert table.max_ids_per_partition == 128
    assert table.max_unique_ids_per_partition == 64


def test_own_arguments_are_given_by_name():
    own = {"deduplicate", "dtype", "max_norm", "out_of_range"}
    own |= {"storage", "vocabulary"}
    fields = dataclasses.fields(TableConfig)
    assert {field.name for field in fields if field.kw_only} == own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "`name` of a table"),
        ({"vocabulary_size": 0}, r"at least 1 and .*vocabulary_size=0"),
        ({"vocabulary_size": 10.0}, "vocabulary_size=10.0"),
        ({"embedding_dim": True}, "embedding_dim=True"),
        ({"hot_rows": 5}, r"removed.*hot_rows=5 \(table 'words'\).*Leave"),
        ({"hot_rows": np.array([3, 1])}, "`hot_rows` was removed"),
        ({"combiner": "max"}, "combiner='max'"),
        ({"placement": "diagonal"}, "placement='diagonal'"),
        ({"placement": 3}, "placement=3"),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"out_of_range": "clip"}, "out_of_range='clip'"),
        ({"deduplicate": "yes"}, "deduplicate='yes'"),
        ({"placement": GRID, "deduplicate": False}, "contradicts"),
        ({"placement": "data_parallel", "deduplicate": True}, "Leave it out"),
    ],
)
def test_wrong_tables_are_refused(arguments, message):
    right = {"name": "words", "vocabulary_size": 1000, "embedding_dim": 16}
    with pytest.raises(ValueError, match=message):
        TableConfig(**{**right, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": None}, "`name` of a feature"),
        ({"table": "words"}, "must be a TableConfig"),
        ({"input_shape": ()}, r"input_shape=\(\) \(feature 'query'\)"),
        ({"input_shape": 3}, "input_shape=3"),
        ({"input_shape": (None, -1)}, "batch dimension"),
        ({"output_shape": (None, 8)}, "embedding_dim, 16"),
        ({"output_shape": (None, 10, 16)}, "needs a table with combiner=None"),
        ({"table": KEPT}, r"row of every id is kept.*input_shape=\(None, 10\)"),
        ({"hotness": 0}, "hotness=0"),
        ({"unique": float("inf")}, "unique=inf"),
    ],
)
def test_wrong_features_are_refused(arguments, message):
    right = {
        "name": "query",
        "table": TABLE,
        "input_shape": (None, 10),
        "output_shape": (None, 16),
    }
    with pytest.raises(ValueError, match=message):
        FeatureConfig(**{**right, **arguments})


def test_integers_and_shapes_of_other_libraries_are_accepted():
    table = TableConfig("words", np.int64(1000), np.int32(16))
    assert type(table.vocabulary_size) is int
    feature = FeatureConfig("query", table, [None, np.int64(3)], [None, 16])
    assert feature.input_shape == (None, 3)


def test_configs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TABLE.name = "other"


@pytest.mark.parametrize(
    "placement", ["auto", "row_wise", GRID, TablePlacement.row_wise(4)]
)
def test_a_feature_survives_its_config_in_json(placement):
    table = TableConfig("words", 1000, 16, "zeros", "sgd", placement=placement)
    feature = FeatureConfig("query", table, (None, None), (None, 16), hotness=3)
    config = json.loads(json.dumps(feature.get_config()))
    assert FeatureConfig.from_config(config) == feature


def test_configs_from_before_hot_rows_were_removed_are_read():
    table = TableConfig("words", 1000, 16, placement=GRID)
    config = table.get_config()
    assert "hot_rows" not in config and "hot_ids" not in config["placement"]
    config["placement"]["hot_ids"] = []
    for off in (0, []):
        assert TableConfig.from_config({**config, "hot_rows": off}) == table
    with pytest.raises(ValueError, match="`hot_rows` was removed"):
        TableConfig.from_config({**config, "hot_rows": [7]})
    config["placement"]["hot_ids"] = [7]
    with pytest.raises(ValueError, match="`hot_ids` was removed"):
        TableConfig.from_config(config)


def test_the_caller_writes_initializer_and_optimizer():
    table = TableConfig("words", 1000, 16, object(), object())
    config = table.get_config(serialize=lambda value: [value])
    assert config["initializer"] == [table.initializer]
    again = TableConfig.from_config(config, deserialize=lambda value: value[0])
    assert again == table


def test_features_may_share_a_table_read_before():
    config = FeatureConfig("a", TABLE, (None,), (None, 16)).get_config()
    config["table"] = TABLE
    assert FeatureConfig.from_config(config).table is TABLE
