# SPDX-License-Identifier: Apache-2.0
"""Initial values of tables, which do not depend on the number of ranks."""

from __future__ import annotations

import collections
import hashlib
import math
import secrets
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_ext import tensorflow_internals as internals
from tfdist_ext.embedding import whole_tables
from tfdist_ext.ops import lookup_ops
from tfdist_ext.tables.placement import ShardSpec
from tfdist_ext.type_names import DTypeLike
from tfdist_ext.type_names import InitializerLike
from tfdist_ext.type_names import Shape
from tfdist_ext.type_names import TensorLike

if TYPE_CHECKING:
    from tfdist_ext.comm.collectives import Collectives

# Standard deviation of a unit normal truncated at two standard deviations.
_TRUNCATED_STDDEV = 0.87962566103423978

Initializer = Callable[..., tf.Tensor]

# Tables per name since TensorFlow's seed was set, by its generator. Setting the
# seed creates another generator.
_seen: weakref.WeakKeyDictionary[InitializerLike, collections.Counter[str]] = (
    weakref.WeakKeyDictionary()
)
_numbers: weakref.WeakKeyDictionary[InitializerLike, dict[str, int]] = (
    weakref.WeakKeyDictionary()
)


def for_shard(
    initializer: InitializerLike,
    spec: ShardSpec,
    collectives: Collectives | None,
) -> Initializer:
    """Returns an initializer that makes one rank's block of a table.

    Args:
        initializer: a Keras initializer: zeros, ones, constant (a number, or
            an entire table of which this rank's part is read), uniform,
            normal, truncated normal or of the variance scaling family.
        spec: the part of the table to make.
        collectives: the strategy's collectives; all ranks use the seed of
            rank 0. None in one process.

    Returns:
        A Keras initializer for the local shape. Values depend only on the
        seed, the table's name, the row and the column.

    Raises:
        ValueError: if a rank cannot make its own rows of a partitioned table.
    """
    if type(initializer).__name__ == "Constant" and np.ndim(initializer.value):
        return _of_matrix(initializer.value, spec)
    described = _describe(initializer, spec)
    if described is None:
        if not spec.partitioned:
            return initializer
        raise ValueError(
            f"Table '{spec.table}' is partitioned over {spec.world_size} "
            "ranks; its initializer must be zeros, ones, constant, "
            "(truncated) normal, uniform or a variance scaling one, so that "
            f"every rank can make its own rows. Received: {initializer!r}. "
            "With any other initializer use sharding='data_parallel' "
            "(FullSparse) or placement='data_parallel' (TableConfig)."
        )
    distribution, first, second = described

    def initialize(
        shape: Shape, dtype: DTypeLike = None, **kwargs: Any
    ) -> tf.Tensor:
        del shape, kwargs
        seed = tf.constant(seed_of(initializer, spec.table), tf.int64)
        if spec.partitioned and collectives is not None:
            seed = collectives.initial_value(seed, f"{spec.table}/seed")
        block = lookup_ops.init_rows(
            rows=spec.rows,
            row_part=spec.cell[0] if spec.cell else 0,
            row_parts=spec.row_parts,
            local_rows=spec.local_rows,
            first_column=spec.columns[0],
            local_dim=spec.local_dim,
            seed=seed,
            distribution=distribution,
            a=first,
            b=second,
        )
        return tf.cast(block, dtype or tf.float32)

    return initialize


def _of_matrix(value: TensorLike, spec: ShardSpec) -> Initializer:
    """Returns an initializer that reads one rank's block of a given table."""
    try:
        whole = np.broadcast_to(np.asanyarray(value), (spec.rows, spec.dim))
    except ValueError as error:
        raise ValueError(
            f"Table '{spec.table}' has shape {(spec.rows, spec.dim)}. Received "
            f"an initializer Constant of shape {np.shape(value)}."
        ) from error

    def initialize(
        shape: Shape, dtype: DTypeLike = None, **kwargs: Any
    ) -> tf.Tensor:
        del shape, kwargs
        part = whole_tables.read_part(
            whole,
            spec,
            spec.local_shape,
            tf.as_dtype(dtype or tf.float32).as_numpy_dtype,
        )
        return tf.convert_to_tensor(part)

    return initialize


def describe_rows(
    initializer: InitializerLike, spec: ShardSpec
) -> tuple[str, float, float]:
    """Returns the distribution of a table's rows and its two parameters.

    Args:
        initializer: a Keras initializer.
        spec: any part of the table.

    Raises:
        ValueError: if the initializer cannot make single rows.
    """
    of_matrix = type(initializer).__name__ == "Constant" and np.ndim(
        initializer.value
    )
    described = None if of_matrix else _describe(initializer, spec)
    if described is None:
        raise ValueError(
            f"Table '{spec.table}' gives the rows of evicted keys to new "
            "keys, and sets them to initial values. Its initializer must be "
            "zeros, ones, constant, (truncated) normal, uniform or a variance "
            f"scaling one. Received: {initializer!r}. With any other "
            "initializer leave out `evict` and `steps_to_live`."
        )
    return described


def seed_of(initializer: InitializerLike, table: str) -> int:
    """Returns the seed of a table's initial values, random if there is none.

    Args:
        initializer: a Keras initializer. If it has no seed, TensorFlow's
            global seed is used, and tables with equal names in two models
            still start with different values.
        table: the table's name.
    """
    return _numbers_of(initializer, table, 1, b"")[0]


def hash_key_of(initializer: InitializerLike, table: str) -> list[int]:
    """Returns the secret key of the hash of a table's keys.

    It is random if there is no seed. It cannot be derived from the initial
    values that belong to `seed_of`.

    Args:
        initializer: a Keras initializer, see `seed_of`.
        table: the table's name.

    Returns:
        Two signed 64-bit numbers.
    """
    return _numbers_of(initializer, table, 2, b"hash of keys")


def _numbers_of(
    initializer: InitializerLike, table: str, count: int, purpose: bytes
) -> list[int]:
    seed = initializer.get_config().get("seed")
    if not isinstance(seed, int):
        seed = internals.global_seed()
        if seed is None:
            seed = secrets.randbits(128)
        else:
            table += "/" * _number(initializer, table)
    digest = hashlib.blake2b(
        f"{seed}/{table}".encode(), digest_size=8 * count, person=purpose
    ).digest()
    return np.frombuffer(digest, "<i8").tolist()


def _number(initializer: InitializerLike, table: str) -> int:
    """Returns how many tables had that name since TensorFlow's seed was set."""
    numbers = _numbers.setdefault(initializer, {})
    if table not in numbers:
        seen = _seen.setdefault(internals.seeding(), collections.Counter())
        numbers[table] = seen[table]
        seen[table] += 1
    return numbers[table]


def _describe(
    initializer: InitializerLike, spec: ShardSpec
) -> tuple[str, float, float] | None:
    """Returns distribution and two parameters; None if it is not known."""
    name = type(initializer).__name__
    if not hasattr(initializer, "get_config"):
        return None
    config = initializer.get_config()
    if name == "Zeros":
        return "zeros", 0.0, 0.0
    if name == "Ones":
        return "constant", 1.0, 0.0
    if name == "Constant":
        return "constant", float(config["value"]), 0.0
    if name == "RandomUniform":
        return "uniform", config["minval"], config["maxval"]
    if name == "RandomNormal":
        return "normal", config["mean"], config["stddev"]
    if name == "TruncatedNormal":
        return "truncated_normal", config["mean"], config["stddev"]
    if hasattr(initializer, "scale") and hasattr(initializer, "mode"):
        return _variance_scaling(initializer, spec)
    return None


def _variance_scaling(
    initializer: InitializerLike, spec: ShardSpec
) -> tuple[str, float, float]:
    fans = {
        "fan_in": spec.rows,
        "fan_out": spec.dim,
        "fan_avg": (spec.rows + spec.dim) / 2,
    }
    variance = initializer.scale / max(1.0, fans[initializer.mode])
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return "uniform", -limit, limit
    if initializer.distribution == "untruncated_normal":
        return "normal", 0.0, math.sqrt(variance)
    stddev = math.sqrt(variance) / _TRUNCATED_STDDEV
    return "truncated_normal", 0.0, stddev
