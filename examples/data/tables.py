# SPDX-License-Identifier: Apache-2.0
"""Tables of raw columns in CSV, TFRecord and Parquet files, as batches.

Each format is read by the library that is made for it; a batch is the same
dictionary of columns for all of them.
"""

import csv
import itertools
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

LABEL = "clicked"
COLUMNS = {
    "user": tf.string,
    "item": tf.int64,
    "tags": tf.string,
    "price": tf.float32,
    LABEL: tf.float32,
}
Rows = Mapping[str, np.ndarray]


def from_csv(files: Sequence[str], batch_size: int) -> tf.data.Dataset:
    """Batches of CSV files whose first line names the columns."""
    return tf.data.experimental.make_csv_dataset(
        list(files),
        batch_size,
        column_defaults=list(COLUMNS.values()),
        select_columns=list(COLUMNS),
        num_epochs=1,
        shuffle=False,
    )


def from_tfrecord(files: Sequence[str], batch_size: int) -> tf.data.Dataset:
    """Batches of files of `tf.train.Example`."""
    features = {
        name: tf.io.FixedLenFeature([], dtype)
        for name, dtype in COLUMNS.items()
    }
    records = tf.data.TFRecordDataset(list(files)).batch(batch_size)
    return records.map(
        lambda batch: tf.io.parse_example(batch, features),
        num_parallel_calls=tf.data.AUTOTUNE,
    )


def from_parquet(files: Sequence[str], batch_size: int) -> tf.data.Dataset:
    """Batches of Parquet files, which must be read with pyarrow."""
    from pyarrow import dataset as parquet

    table = parquet.dataset(list(files), format="parquet")

    def parts() -> Iterator[dict[str, Any]]:
        for part in table.to_batches(list(COLUMNS), batch_size=batch_size):
            yield {
                name: part.column(name).to_numpy(zero_copy_only=False)
                for name in COLUMNS
            }

    signature = {
        name: tf.TensorSpec([None], dtype) for name, dtype in COLUMNS.items()
    }
    batches = tf.data.Dataset.from_generator(parts, output_signature=signature)
    # Parts end where a file ends. How many batches there are is known.
    count = -(-table.count_rows() // batch_size)
    known = tf.data.experimental.assert_cardinality(count)
    return batches.rebatch(batch_size).apply(known)


READERS: dict[str, Callable[[Sequence[str], int], tf.data.Dataset]] = {
    "csv": from_csv,
    "tfrecord": from_tfrecord,
    "parquet": from_parquet,
}


def dataset(
    kind: str, files: Sequence[str], batch_size: int
) -> tf.data.Dataset:
    """Batches of the features, each `[b, 1]`, and the labels, `[b, 1]`.

    Args:
      kind: One of `READERS`.
      files: Paths, read in this order.
      batch_size: Rows per batch, over all ranks.
    """

    def split(batch: Rows) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        columns = {k: tf.expand_dims(v, 1) for k, v in batch.items()}
        return columns, columns.pop(LABEL)

    return READERS[kind](files, batch_size).map(split)


def samples(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of made-up clicks: of users with a taste, on tagged items."""
    rng = np.random.default_rng(seed)
    users, items = rng.zipf(1.3, count) % 500, rng.zipf(1.3, count) % 200
    tags = rng.integers(0, 20, [200, 3])
    taste, worth = rng.normal(size=500), rng.normal(size=20)
    price = rng.lognormal(1, 0.5, count)
    score = 2 * taste[users] + worth[tags[items]].sum(1) - 0.2 * price
    columns = {
        "user": np.array([f"user-{user}" for user in users]),
        "item": 10**12 + items,  # As wide as the identifiers of a shop.
        "tags": np.array([" ".join(f"t{t}" for t in tags[i]) for i in items]),
        "price": price.astype(np.float32),
        LABEL: (score > rng.logistic(size=count)).astype(np.float32),
    }
    assert list(columns) == list(COLUMNS)
    return columns


def write(
    kind: str, folder: pathlib.Path, rows: Rows, files: int = 2
) -> list[str]:
    """Writes rows to files of a format, and returns their paths in order."""
    count = len(rows[LABEL])
    bounds = [count * i // files for i in range(files + 1)]
    paths = []
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        path = folder / f"part-{index}.{kind}"
        part = {name: column[first:last] for name, column in rows.items()}
        _WRITERS[kind](path, part)
        paths.append(str(path))
    return paths


def _to_csv(path: pathlib.Path, rows: Rows) -> None:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(rows)
        writer.writerows(zip(*rows.values(), strict=True))


def _to_tfrecord(path: pathlib.Path, rows: Rows) -> None:
    def feature(value: Any) -> tf.train.Feature:
        if isinstance(value, str):
            text = tf.train.BytesList(value=[value.encode()])
            return tf.train.Feature(bytes_list=text)
        if isinstance(value, np.integer):
            whole = tf.train.Int64List(value=[int(value)])
            return tf.train.Feature(int64_list=whole)
        number = tf.train.FloatList(value=[float(value)])
        return tf.train.Feature(float_list=number)

    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in zip(*rows.values(), strict=True):
            known = dict(zip(rows, map(feature, row), strict=True))
            features = tf.train.Features(feature=known)
            example = tf.train.Example(features=features)
            writer.write(example.SerializeToString())


def _to_parquet(path: pathlib.Path, rows: Rows) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(dict(rows)), path)


_WRITERS = {"csv": _to_csv, "tfrecord": _to_tfrecord, "parquet": _to_parquet}
