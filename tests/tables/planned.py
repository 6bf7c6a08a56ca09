# SPDX-License-Identifier: Apache-2.0
"""Tables and features to plan for: workloads, and random ones."""

import random

from benchmarks import workloads
from tfdist_ext.tables import plan as plan_lib
from tfdist_ext.tables.table_config import FeatureConfig
from tfdist_ext.tables.table_config import TableConfig

# Rows, columns, ids per sample.
MEDIUM = (100_000, 16, 10)


def configs(sizes, **arguments):
    """One table and one feature per (rows, columns, ids per sample)."""
    tables = [
        TableConfig(f"t{i}", rows, dim, **arguments)
        for i, (rows, dim, _) in enumerate(sizes)
    ]
    features = [
        FeatureConfig(f"f{i}", table, (None, ids), (None, table.embedding_dim))
        for i, (table, (_, _, ids)) in enumerate(
            zip(tables, sizes, strict=True)
        )
    ]
    return tables, features


def sizes_of(name):
    """Sizes of a workload's tables."""
    return [
        (table.rows, table.width, table.hotness)
        for table in workloads.WORKLOADS[name].tables
    ]


def make_plan(sizes, world_size, **arguments):
    """A plan for tables of these sizes."""
    return plan_lib.plan(*configs(sizes), world_size, **arguments)


def plan_workload(name, world_size, **arguments):
    """A plan for a workload, at the batch size it is measured with."""
    batch_size = 2048 if name.startswith("criteo") else 256
    sizes = sizes_of(name)
    return make_plan(sizes, world_size, batch_size=batch_size, **arguments)


def random_sizes(seed, count):
    """Tables from tiny to large, one-hot and pooled."""
    generator = random.Random(seed)
    return [
        (
            int(10 ** generator.uniform(0, 6.5)),
            generator.choice([1, 3, 8, 16, 58, 64]),
            generator.choice([1, 1, 4, 50]),
        )
        for _ in range(count)
    ]
