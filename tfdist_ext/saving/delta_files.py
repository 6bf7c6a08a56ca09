# SPDX-License-Identifier: Apache-2.0
"""The file of a delta, and the ops by which a served model reads it.

It is a TFRecord file of `tf.train.Example`s; TFRecord adds checksums. The first
record has the export id of the model, the number of the delta, and the number
of records. Each other record has rows of a table or one entire variable.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist_ext.saving.served_keys import KeyChanges
from tfdist_ext.saving.served_keys import ServedKeys
from tfdist_ext.saving.served_table import ServedTable
from tfdist_ext.type_names import JsonObject
from tfdist_ext.type_names import Variable

FORMAT = "tfdist_ext delta 1"
_NUMBERS = ("number", "records", "microseconds", "variable")
_TEXTS = ("format", "export_id", "name", "ids", "values", "scales", "texts")
# Serialized tensors must have less than 2 GiB.
ROWS_NUMBERS = 1 << 26


# Index of the table, ids, and encoded rows by variable.
_Rows = tuple[int, np.ndarray, Mapping[str, np.ndarray]]
_Records = list[JsonObject]


def write(
    path: str,
    export_id: str,
    number: int,
    tables: Mapping[str, _Rows],
    dense: Sequence[tf.Tensor],
    keys: Sequence[KeyChanges],
) -> None:
    """Writes a delta to a temporary file, then renames it.

    Args:
        path: path of the file.
        export_id: export id of the model.
        number: number of the delta, from 1.
        tables: by name: index of the table in the model, ids `[n]`, and encoded
            rows by variable.
        dense: values of the other variables, in order.
        keys: changes of the dynamic vocabularies, in order.
    """
    removed, added = _of_keys(keys, len(tables) + len(dense))
    # Keys are removed first and added last. A lookup during the update then
    # finds a key without a row rather than with the row of another key.
    records = [*removed, *_of_tables(tables)]
    for index, value in enumerate(dense):
        place = len(tables) + index
        records.append({"variable": place, "values": _bytes(value)})
    records += added
    header = {
        "format": FORMAT,
        "export_id": export_id,
        "number": number,
        "records": len(records),
        "microseconds": time.time_ns() // 1000,
    }
    partial = f"{path}.writing"
    try:
        with tf.io.TFRecordWriter(partial) as file:
            for record in (header, *records):
                file.write(_example(record))
        tf.io.gfile.rename(partial, path, overwrite=True)
    finally:
        if tf.io.gfile.exists(partial):
            tf.io.gfile.remove(partial)


def _of_tables(tables: Mapping[str, _Rows]) -> _Records:
    records: _Records = []
    for name, (index, ids, encoded) in tables.items():
        for rows in _blocks(len(ids), encoded["values"].shape[1]):
            parts = {key: _bytes(value[rows]) for key, value in encoded.items()}
            parts["ids"] = _bytes(ids[rows])
            records.append({"name": name, "variable": index, **parts})
    return records


def _of_keys(
    keys: Sequence[KeyChanges], first: int
) -> tuple[_Records, _Records]:
    """Records of removed and of added keys; `first` is the first number."""
    removed: _Records = []
    added: _Records = []
    for place, changes in enumerate(keys, first):
        for part in _blocks(*changes.removed.shape):
            ids = _bytes(changes.removed[part])
            removed.append({"variable": place, "ids": ids})
        for part in _blocks(*changes.added.shape):
            parts = {
                "ids": _bytes(changes.added[part]),
                "values": _bytes(changes.rows[part]),
            }
            if changes.texts is not None:
                parts["texts"] = _bytes(changes.texts[part])
            added.append({"variable": place + len(keys), **parts})
    return removed, added


def _blocks(rows: int, columns: int) -> list[slice]:
    """Slices of `rows` rows, each small enough for one record."""
    step = max(1, ROWS_NUMBERS // columns)
    return [slice(first, first + step) for first in range(0, rows, step)]


def _bytes(value: object) -> bytes:
    return bytes(tf.io.serialize_tensor(tf.constant(value)).numpy())


def _example(record: Mapping[str, object]) -> bytes:
    features = {}
    for key, value in record.items():
        if isinstance(value, int):
            numbers = tf.train.Int64List(value=[value])
            features[key] = tf.train.Feature(int64_list=numbers)
        else:
            text = value.encode() if isinstance(value, str) else value
            texts = tf.train.BytesList(value=[text])
            features[key] = tf.train.Feature(bytes_list=texts)
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString())


Parsed = Mapping[str, tf.Tensor]


def read(path: tf.Tensor) -> tf.Tensor:
    """All records of a file, string `[n]`; fails if one is damaged."""
    return tf.data.TFRecordDataset(path).batch(1 << 30).get_single_element()


def parse(record: tf.Tensor) -> Parsed:
    """The fields of a record, 0 or "" for missing ones."""
    fields: dict[str, tf.io.FixedLenFeature] = {
        name: tf.io.FixedLenFeature([], tf.int64, 0) for name in _NUMBERS
    }
    for name in _TEXTS:
        fields[name] = tf.io.FixedLenFeature([], tf.string, "")
    found: Parsed = tf.io.parse_single_example(record, fields)
    return found


def check(
    header: Parsed, count: tf.Tensor, export_id: str, last: tf.Tensor
) -> list[tf.Operation]:
    """Rejects a file that is not the next delta of the model.

    Args:
        header: the first record.
        count: number of records in the file.
        export_id: export id of the model.
        last: number of the last delta applied to the model.
    """
    return [
        tf.debugging.Assert(good, message)
        for good, message in (
            (
                tf.equal(header["format"], FORMAT),
                [
                    f"The file is not a '{FORMAT}'. Its format:",
                    header["format"],
                ],
            ),
            (
                tf.equal(header["export_id"], export_id),
                [
                    f"The model is of export {export_id}. The delta is for "
                    "another export, load that one:",
                    header["export_id"],
                ],
            ),
            (
                tf.equal(header["number"], last + 1),
                [
                    "Deltas are applied in order. The last one and this one:",
                    last,
                    header["number"],
                ],
            ),
            (
                tf.equal(header["records"], count - 1),
                ["Records are missing at the end of the delta."],
            ),
        )
    ]


Assign = Callable[[Parsed], tf.Tensor]


def apply(records: tf.Tensor, assignments: Sequence[Assign]) -> tf.Tensor:
    """Assigns the contents of all records; returns the number of rows.

    Args:
        records: string `[n]`, the header first.
        assignments: functions by the number of the variable in a record.
    """

    def one(index: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        record = parse(records[index])
        found = tf.switch_case(
            tf.cast(record["variable"], tf.int32),
            [functools.partial(assign, record) for assign in assignments],
        )
        return index + 1, rows + found

    count = tf.size(records)
    _, rows = tf.while_loop(
        lambda index, _: index < count,
        one,
        (tf.constant(1), tf.zeros([], tf.int64)),
        parallel_iterations=1,
    )
    return rows


def assign_rows(table: ServedTable) -> Assign:
    """A function that assigns rows of a table; returns their number."""

    def assign(record: Parsed) -> tf.Tensor:
        ids = tf.io.parse_tensor(record["ids"], tf.int64)
        ids = tf.ensure_shape(ids, [None])
        for name, variable in table.parts().items():
            rows = tf.io.parse_tensor(record[name], variable.dtype)
            rows = tf.ensure_shape(rows, variable.shape)
            variable.scatter_update(tf.IndexedSlices(rows, ids))
        return tf.size(ids, tf.int64)

    return assign


def assign_whole(variable: Variable) -> Assign:
    """A function that assigns an entire variable; returns 0 rows."""

    def assign(record: Parsed) -> tf.Tensor:
        value = tf.io.parse_tensor(record["values"], variable.dtype)
        variable.assign(tf.ensure_shape(value, variable.shape))
        return tf.zeros([], tf.int64)

    return assign


def remove_keys(keys: ServedKeys) -> Assign:
    """A function that removes a record's keys; returns 0 rows."""

    def assign(record: Parsed) -> tf.Tensor:
        with tf.control_dependencies([keys.remove(_keys_of(record, keys))]):
            return tf.zeros([], tf.int64)

    return assign


def insert_keys(keys: ServedKeys) -> Assign:
    """A function that inserts a record's keys and rows; returns 0 rows."""

    def assign(record: Parsed) -> tf.Tensor:
        rows = tf.io.parse_tensor(record["values"], tf.int64)
        rows = tf.ensure_shape(rows, [None])
        texts = record["texts"]
        if keys.texts is not None:
            texts = tf.io.parse_tensor(texts, tf.string)
            texts = tf.ensure_shape(texts, [None])
        found = keys.insert(_keys_of(record, keys), rows, texts)
        with tf.control_dependencies([found]):
            return tf.zeros([], tf.int64)

    return assign


def _keys_of(record: Parsed, keys: ServedKeys) -> tf.Tensor:
    found = tf.io.parse_tensor(record["ids"], tf.int64)
    return tf.ensure_shape(found, [None, keys.words])
