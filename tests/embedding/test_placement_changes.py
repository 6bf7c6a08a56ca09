# SPDX-License-Identifier: Apache-2.0
"""Every placement becomes every other one, with the values of the table."""

import numpy as np
import pytest
import tensorflow as tf

from tests.embedding.placements import DIM
from tests.embedding.placements import ROWS
from tests.embedding.placements import TABLE
from tests.embedding.placements import kinds
from tests.embedding.placements import spec_of
from tests.thread_ranks import run_on_ranks
from tfdist_ext import marks
from tfdist_ext.comm.collectives import Collectives
from tfdist_ext.embedding import sharded_variable
from tfdist_ext.embedding import whole_tables
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.tables.placement import TablePlacement


def part_of(whole, spec):
    return whole_tables.read_part(whole, spec, spec.local_shape, np.float32)


def make_shard(placement, group, dtype=tf.float32):
    """This rank's part of TABLE as a variable, and the collectives."""
    spec = spec_of(placement, group.rank, group.world_size)
    variable = tf.Variable(tf.cast(part_of(TABLE, spec), dtype))
    collectives = Collectives(group)
    sharded_variable.hold(variable, spec, collectives)
    return variable, collectives


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_kind_becomes_every_other(ranks):
    # Blocks of 4 rows: parts have rows of several blocks, the last is short.
    block = 4 * DIM
    placements = kinds(ranks)

    def work(group):
        for source in placements.values():
            for target in placements.values():
                variable, collectives = make_shard(source, group)
                new = spec_of(target, group.rank, group.world_size)
                sharded_variable.move_table(variable, new, collectives, block)
                expected = part_of(TABLE, new)
                np.testing.assert_array_equal(variable.numpy(), expected)
                assert tuple(variable.shape) == new.local_shape
                assert marks.shard_spec(variable) == new
                np.testing.assert_array_equal(
                    whole_tables.gather(variable, collectives), TABLE
                )
        return True

    assert run_on_ranks(ranks, work, timeout=60.0) == [True] * ranks


def test_a_moved_variable_works_in_graphs_and_takes_new_values():
    def work(group):
        variable, collectives = make_shard(TablePlacement.row_wise(2), group)
        new = spec_of(TablePlacement.column_wise(2), group.rank, 2)
        sharded_variable.move_table(variable, new, collectives)

        @tf.function
        def doubled():
            assert tuple(variable.read_value().shape) == new.local_shape
            variable.assign(2 * variable.read_value())
            rows = tf.raw_ops.ResourceGather(
                resource=variable.handle, indices=[0, 22], dtype=tf.float32
            )
            assert tuple(rows.shape) == (2, new.local_dim)
            return rows

        rows = doubled().numpy()
        expected = 2 * TABLE[:, slice(*new.columns)]
        np.testing.assert_array_equal(rows, expected[[0, 22]])
        np.testing.assert_array_equal(variable.numpy(), expected)
        return True

    assert run_on_ranks(2, work) == [True, True]


def test_sixteen_bit_tables_are_moved():
    def work(group):
        variable, collectives = make_shard(
            TablePlacement.table_wise(1), group, tf.bfloat16
        )
        new = spec_of(TablePlacement.row_wise(2), group.rank, 2)
        sharded_variable.move_table(variable, new, collectives)
        assert variable.dtype == tf.bfloat16
        expected = tf.cast(part_of(TABLE, new), tf.bfloat16)
        np.testing.assert_array_equal(variable.numpy(), expected.numpy())
        return True

    assert run_on_ranks(2, work) == [True, True]


@pytest.mark.parametrize("reason", ["whole", "fixed", "other"])
def test_what_cannot_be_moved_is_refused(reason):
    def work(group):
        variable, collectives = make_shard(TablePlacement.row_wise(2), group)
        target = TablePlacement.column_wise(2)
        if reason == "whole":
            target = TablePlacement.data_parallel()
        new = spec_of(target, group.rank, 2)
        if reason == "fixed":
            marks.fix(variable)
        if reason == "other":
            new = ShardSpec.of("table", ROWS, DIM + 1, target, group.rank, 2)
        match = "trained" if reason == "fixed" else "cannot become"
        with pytest.raises(ValueError, match=match):
            sharded_variable.move_table(variable, new, collectives)
        np.testing.assert_array_equal(
            whole_tables.gather(variable, collectives), TABLE
        )
        return True

    assert run_on_ranks(2, work) == [True, True]
