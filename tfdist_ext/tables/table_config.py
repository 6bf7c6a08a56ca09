# SPDX-License-Identifier: Apache-2.0
"""Configurations of tables, features and dynamic vocabularies."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import SupportsIndex

from tfdist_ext.tables import checks
from tfdist_ext.tables.checks import refuse_removed
from tfdist_ext.tables.checks import without_removed
from tfdist_ext.tables.placement import TablePlacement

# Rows are numbered with 32 bits, and one row is shared.
MOST_KEYS = (1 << 31) - 2
# Rows per bucket. With so many, at least 97 % of all rows have keys before any
# bucket is full: docs/vocabularies.md derives it.
_ROWS_OF_BUCKET = 65536
_MOST_BUCKETS = 1024


@dataclasses.dataclass(frozen=True)
class DynamicVocabulary:
    """A dynamic vocabulary of a table: keys get rows when first seen.

    Keys are any 64-bit integers, or strings. See docs/vocabularies.md.

    >>> users = DynamicVocabulary(1_000_000, min_count=2, evict="lru")
    >>> users.rows
    1000001

    Attributes:
        capacity: number of keys that can have rows at a time.
        min_count: occurrences, over all ranks and steps, after which a key gets
            a row. Until then it is a candidate.
        evict: which keys lose their rows when no row is free: "lru", the keys
            seen least recently; "lfu", the keys seen least often; None, no
            keys.
        steps_to_live: a key that was not seen for more steps than this loses
            its row; None for never.
        key_dtype: "int64" or "string".
        full: what a new key gets when no row is free: "error" ends the step on
            every rank, "shared_row" is row 0.
        unadmitted: what candidates, and keys that were never trained, get:
            "zeros", which are not trained, or "shared_row".
        keep_text: whether to store the texts of string keys that have rows, for
            `get_vocabularies`, checkpoints and exports.

    Raises:
        ValueError: a value is invalid.
    """

    capacity: int
    min_count: int = 1
    evict: checks.Evict | None = None
    steps_to_live: int | None = None
    key_dtype: checks.KeyDtype = "int64"
    full: checks.Full = dataclasses.field(default="error", kw_only=True)
    unadmitted: checks.Unadmitted = dataclasses.field(
        default="zeros", kw_only=True
    )
    keep_text: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        where = "DynamicVocabulary"
        most = {"capacity": MOST_KEYS, "min_count": (1 << 32) - 1}
        for field, limit in most.items():
            value = checks.integer(field, getattr(self, field), 1, where, limit)
            object.__setattr__(self, field, value)
        if self.steps_to_live is not None:
            steps = checks.integer(
                "steps_to_live", self.steps_to_live, 1, where, (1 << 32) - 1
            )
            object.__setattr__(self, "steps_to_live", steps)
        if self.evict is not None:
            checks.one_of("evict", self.evict, checks.EVICTIONS, where)
        checks.one_of("key_dtype", self.key_dtype, checks.KEY_DTYPES, where)
        checks.one_of("full", self.full, checks.FULL, where)
        checks.one_of("unadmitted", self.unadmitted, checks.UNADMITTED, where)
        checks.boolean("keep_text", self.keep_text, where, optional=False)
        if self.keep_text and self.key_dtype != "string":
            raise ValueError(
                "Argument `keep_text` must be False if keys are not strings. "
                f"Received: keep_text=True, key_dtype='{self.key_dtype}' "
                f"({where}). Leave it out, or use key_dtype='string'."
            )

    @property
    def rows(self) -> int:
        """Rows of the table: one for each key, and the shared row 0."""
        return self.capacity + 1

    @property
    def reuses_rows(self) -> bool:
        """Whether a key may lose its row."""
        return self.evict is not None or self.steps_to_live is not None

    @property
    def buckets(self) -> int:
        """Buckets of a new vocabulary, a power of two; saved ones differ."""
        wanted = min(max(self.capacity // _ROWS_OF_BUCKET, 1), _MOST_BUCKETS)
        return 1 << (wanted.bit_length() - 1)

    def get_config(self) -> checks.Fields:
        """The arguments that create an equal object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, object]) -> DynamicVocabulary:
        """The object that `get_config` describes.

        Args:
            config: result of `get_config`.

        Raises:
            ValueError: fields are unknown or missing.
        """
        return cls(**checks.fields_of(cls, config, "config of a vocabulary"))


def refuse_vocabulary(field: str, value: object, where: str) -> None:
    """Rejects a dynamic vocabulary as a number of rows.

    Raises:
        ValueError: the value is a dynamic vocabulary.
    """
    if isinstance(value, DynamicVocabulary):
        raise ValueError(
            f"Argument `{field}` must be a number of rows. Received: "
            f"{field}={value} ({where}). Dynamic vocabularies are for tables "
            "of DistributedEmbedding: TableConfig(name, embedding_dim=..., "
            "vocabulary=DynamicVocabulary(...))."
        )


# Largest sizes of a table.
SIZES = {"vocabulary_size": 1 << 40, "embedding_dim": (1 << 31) - 1}
# Value of sizes that are not given, which is rejected.
_NEEDED = 0
# Smallest mean number of ids of a sample.
SMALLEST = 1e-9


def _as_is(value: object) -> object:
    return value


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A table of weights, `[vocabulary_size, embedding_dim]`.

    Features with the same object share one table.

    >>> words = TableConfig("words", 1 << 20, 64, combiner="sum")
    >>> words.placement
    'auto'

    Attributes:
        name: name of the table, unique within a layer.
        vocabulary_size: number of rows; ids are in `[0, vocabulary_size)`.
        embedding_dim: number of columns.
        initializer: a Keras initializer or its name.
        optimizer: a Keras optimizer or its name, for this table only; None uses
            the model's optimizer.
        combiner: "mean", "sum" or "sqrtn" of a sample's weighted rows; None
            returns the row of every id, for sequences.
        placement: "auto" (the planner chooses), "data_parallel" (unpartitioned
            on every rank), "table_wise" (unpartitioned on one rank),
            "row_wise", "column_wise", "grid", "sparsecore" (the planner
            chooses, but not data_parallel), "default_device" (data_parallel),
            or a `TablePlacement`, which also sets the ranks. The short names of
            `FullSparse` are accepted too.
        max_ids_per_partition: ignored, as buffers grow when needed; accepted
            for configurations of keras-rs.
        max_unique_ids_per_partition: ignored, as above.
        deduplicate: whether ranks request each unique row of a batch once and
            combine rows themselves; None lets the planner choose.
        dtype: dtype of the weights, "float32" or "bfloat16".
        out_of_range: "error" raises on every rank, "ignore" drops the id.
        vocabulary: a `DynamicVocabulary`, which assigns rows to keys as they
            come; omit `vocabulary_size` then.
        max_norm: largest Euclidean norm of a row; an update that makes a row
            longer scales it down to this. None for no limit.
        storage: memory of weights and slots: "device", the GPU of each rank
            with a part, or "host", its main memory. None lets the planner
            choose; without GPUs all tables are on the hosts.
        hot_rows: removed; must be 0 or empty.

    Raises:
        ValueError: a value is invalid.
    """

    name: str
    vocabulary_size: int = _NEEDED
    embedding_dim: int = _NEEDED
    initializer: Any = "uniform"
    optimizer: Any = None
    combiner: checks.Combiner | None = "mean"
    placement: str | TablePlacement = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    hot_rows: dataclasses.InitVar[object] = dataclasses.field(
        default=0, kw_only=True
    )
    deduplicate: bool | None = dataclasses.field(default=None, kw_only=True)
    dtype: str = dataclasses.field(default="float32", kw_only=True)
    out_of_range: checks.OutOfRange = dataclasses.field(
        default="error", kw_only=True
    )
    vocabulary: DynamicVocabulary | None = dataclasses.field(
        default=None, kw_only=True
    )

    max_norm: float | None = dataclasses.field(default=None, kw_only=True)
    storage: checks.Storage | None = dataclasses.field(
        default=None, kw_only=True
    )

    def __post_init__(self, hot_rows: object) -> None:
        where = f"table {self.name!r}"
        checks.name("a table", self.name)
        refuse_removed("hot_rows", hot_rows, where)
        if self.vocabulary is not None:
            self._take_rows_of_vocabulary(where)
        for field, most in SIZES.items():
            value = checks.integer(field, getattr(self, field), 1, where, most)
            object.__setattr__(self, field, value)
        if self.combiner is not None:
            checks.one_of("combiner", self.combiner, checks.COMBINERS, where)
        checks.one_of("dtype", self.dtype, checks.TABLE_DTYPES, where)
        checks.one_of("out_of_range", self.out_of_range, checks.POLICIES, where)
        checks.max_norm(self.max_norm, where)
        checks.storage(self.storage, where)
        self._check_placement(where)

    def _take_rows_of_vocabulary(self, where: str) -> None:
        vocabulary = self.vocabulary
        if not isinstance(vocabulary, DynamicVocabulary):
            raise ValueError(
                "Argument `vocabulary` must be a DynamicVocabulary. Received: "
                f"vocabulary={checks.brief(vocabulary)} ({where})."
            )
        if self.vocabulary_size not in (_NEEDED, vocabulary.rows):
            raise ValueError(
                "Argument `vocabulary_size` must be left out with a dynamic "
                "vocabulary, whose capacity is the size. Received: "
                f"vocabulary_size={checks.brief(self.vocabulary_size)}, "
                f"capacity={vocabulary.capacity} ({where})."
            )
        if self.out_of_range == "ignore":
            raise ValueError(
                "Argument `out_of_range` has no meaning with a dynamic "
                "vocabulary: every key is in range. Leave it out. Received: "
                f"out_of_range={self.out_of_range!r} ({where})."
            )
        object.__setattr__(self, "vocabulary_size", vocabulary.rows)

    def _check_placement(self, where: str) -> None:
        checks.boolean("deduplicate", self.deduplicate, where)
        if not isinstance(self.placement, TablePlacement):
            placement = checks.full_placement(self.placement)
            checks.one_of("placement", placement, checks.PLACEMENTS, where)
            object.__setattr__(self, "placement", placement)
            replicated = self.placement in ("data_parallel", "default_device")
        else:
            replicated = not self.placement.ranks
            if self.deduplicate not in (None, self.placement.deduplicate):
                raise ValueError(
                    "Argument `deduplicate` contradicts the placement: "
                    "received "
                    f"deduplicate={self.deduplicate}, placement="
                    f"{self.placement} ({where}). Leave it out."
                )
        if replicated and self.deduplicate:
            raise ValueError(
                "A table that every rank holds whole has no ids to "
                "deduplicate. Received: placement="
                f"{self.placement!r}, deduplicate={self.deduplicate} "
                f"({where}). Leave it out, or use placement='sparsecore'."
            )

    def get_config(
        self, serialize: Callable[[object], object] = _as_is
    ) -> checks.Fields:
        """The arguments that create an equal object.

        Args:
            serialize: function applied to `initializer` and `optimizer`, for
                example `keras.utils.serialize_keras_object`.

        Returns:
            A dictionary, of JSON values if `serialize` returns such.
        """
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        for field in ("initializer", "optimizer"):
            config[field] = serialize(config[field])
        if isinstance(self.placement, TablePlacement):
            config["placement"] = placement_to_dict(self.placement)
        if self.vocabulary is not None:
            config["vocabulary"] = self.vocabulary.get_config()
        return config

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        deserialize: Callable[[object], object] = _as_is,
    ) -> TableConfig:
        """The object that `get_config` describes.

        Args:
            config: result of `get_config`, or of keras-rs's `get_config`.
            deserialize: inverse of `serialize`. Values that stay serialized are
                deserialized when a layer needs them.

        Raises:
            ValueError: fields are unknown or missing.
        """
        where = "config of a table"
        needed = ("vocabulary_size", "embedding_dim")
        arguments = checks.fields_of(
            cls,
            without_removed(config, "hot_rows", where),
            where,
            needed[bool(config.get("vocabulary")) :],
        )
        for field in ("initializer", "optimizer"):
            if field in arguments:
                arguments[field] = deserialize(arguments[field])
        if isinstance(arguments.get("placement"), Mapping):
            arguments["placement"] = placement_from_dict(arguments["placement"])
        if isinstance(arguments.get("vocabulary"), Mapping):
            arguments["vocabulary"] = DynamicVocabulary.from_config(
                arguments["vocabulary"]
            )
        return cls(**arguments)


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """A column of the input, and the table that it is looked up in.

    Attributes:
        name: name of the feature, unique within a layer.
        table: table that its ids are looked up in.
        input_shape: shape of its ids, `(batch, ids per sample)`; None for
            unknown sizes. The first dimension is the global batch. Further
            dimensions are kept: a combiner combines the ids of the last one.
        output_shape: shape of its result, `(batch, embedding_dim)`; without a
            combiner `(batch, length, embedding_dim)`. Ragged ids are padded
            with zeros or truncated to a given length.
        hotness: mean ids per sample, for the planner, if `input_shape` does not
            have it.
        unique: mean number of unique ids in one rank's batch, for the planner,
            if known.

    Raises:
        ValueError: a value is invalid.
    """

    name: str
    table: TableConfig
    input_shape: Sequence[int | None]
    output_shape: Sequence[int | None]
    hotness: float | None = dataclasses.field(default=None, kw_only=True)
    unique: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        where = f"feature {self.name!r}"
        checks.name("a feature", self.name)
        if not isinstance(self.table, TableConfig):
            raise ValueError(
                "Argument `table` must be a TableConfig. Received: "
                f"table={self.table!r} ({where})."
            )
        for field in ("input_shape", "output_shape"):
            shape = _shape(field, getattr(self, field), where)
            object.__setattr__(self, field, shape)
        self._check_ranks(where)
        if self.output_shape[-1] not in (None, self.table.embedding_dim):
            raise ValueError(
                "The last dimension of `output_shape` must be the table's "
                f"embedding_dim, {self.table.embedding_dim}. Received: "
                f"output_shape={self.output_shape} ({where}, table "
                f"{self.table.name!r})."
            )
        for field in ("hotness", "unique"):
            value = getattr(self, field)
            if value is not None:
                checks.number(field, value, where, least=SMALLEST)

    def _check_ranks(self, where: str) -> None:
        """Checks the number of dimensions of the output."""
        given, found = len(self.input_shape), len(self.output_shape)
        if self.table.combiner is None:
            if found == given + 1:
                return
            raise ValueError(
                "Argument `output_shape` must be that of the ids, followed by "
                "embedding_dim: with combiner=None the row of every id is "
                f"kept. Received: output_shape={self.output_shape}, "
                f"input_shape={self.input_shape} ({where})."
            )
        if found > max(2, given):
            raise ValueError(
                "Argument `output_shape` must be (batch, embedding_dim): the "
                "rows of a sample are combined into one. A sequence of them, "
                "(batch, length, embedding_dim), needs a table with "
                f"combiner=None. Received: output_shape={self.output_shape}, "
                f"combiner={self.table.combiner!r} ({where})."
            )

    def get_config(
        self, serialize: Callable[[object], object] = _as_is
    ) -> checks.Fields:
        """The arguments that create an equal object; see `TableConfig`."""
        return {
            "name": self.name,
            "table": self.table.get_config(serialize),
            "input_shape": self.input_shape,
            "output_shape": self.output_shape,
            "hotness": self.hotness,
            "unique": self.unique,
        }

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        deserialize: Callable[[object], object] = _as_is,
    ) -> FeatureConfig:
        """The object that `get_config` describes.

        Args:
            config: result of `get_config`; `table` may already be a
                TableConfig, as is needed for features that share a table.
            deserialize: see `TableConfig.from_config`.

        Raises:
            ValueError: fields are unknown or missing.
        """
        arguments = checks.fields_of(cls, config, "config of a feature")
        if not isinstance(arguments["table"], TableConfig):
            arguments["table"] = TableConfig.from_config(
                arguments["table"], deserialize
            )
        return cls(**arguments)


def placement_to_dict(placement: TablePlacement) -> checks.Fields:
    """A placement as JSON values."""
    return {
        "row_parts": placement.row_parts,
        "column_parts": placement.column_parts,
        "ranks": list(placement.ranks),
        "deduplicate": placement.deduplicate,
    }


def placement_from_dict(
    config: Mapping[str, object], where: str = "placement"
) -> TablePlacement:
    """The inverse of `placement_to_dict`.

    Args:
        config: result of `placement_to_dict`.
        where: name of the object, for error messages.

    Raises:
        ValueError: the config describes no placement.
    """
    fields = checks.fields_of(
        TablePlacement, without_removed(config, "hot_ids", where), where
    )
    if "ranks" in fields:
        fields["ranks"] = tuple(
            checks.entries(fields["ranks"], f"{where}.ranks")
        )
    return TablePlacement(**fields)


def _shape(
    field: str, value: Iterable[SupportsIndex | None], where: str
) -> tuple[int | None, ...]:
    """`value` as a tuple; tf.TensorShape and lists are accepted too."""
    try:
        shape = tuple(
            None if size is None else operator.index(size) for size in value
        )
    except TypeError:
        shape = ()
    if not shape or any(size is not None and size < 0 for size in shape):
        raise ValueError(
            f"Argument `{field}` must be a shape with a batch dimension, such "
            f"as (None, 10). Received: {field}={value!r} ({where})."
        )
    return shape
