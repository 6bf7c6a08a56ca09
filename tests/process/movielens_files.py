# SPDX-License-Identifier: Apache-2.0
"""Small files in the formats of MovieLens, and what guides read from them."""

import functools
import pathlib
import sys

import numpy as np
import tensorflow as tf

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))

from data.files import demo_directory
from data.files import write_once

USERS, MOVIES, RATINGS = 40, 130, 161
BATCH = 48  # uneven on 2 and 4 ranks in the last batch
WORDS = ["night", "river", "garden", "winter", "stranger", "return", "love"]
JOBS = ["artist", "doctor", "student"]
AGES = np.array([1, 18, 25, 35, 45, 50, 56])


@functools.cache
def write():
    """Files as ml-100k has them, in a folder of their own."""
    folder = demo_directory() / f"movielens-{USERS}-{MOVIES}-{RATINGS}"
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(1)
    people = [
        (
            user,
            rng.integers(7, 70),
            "FM"[user % 2],
            JOBS[user % 3],
            9_000 + user,
        )
        for user in range(1, USERS + 1)
    ]
    films = [
        (
            movie,
            f"{' '.join(rng.choice(WORDS, movie % 3 + 1))} ({1930 + movie})",
        )
        for movie in range(1, MOVIES + 1)
    ]
    # A user rates a movie once.
    weights = np.tile(1.0 / np.arange(1, MOVIES + 1), USERS)
    places = rng.choice(
        USERS * MOVIES, RATINGS, replace=False, p=weights / weights.sum()
    )
    users, movies = places // MOVIES + 1, places % MOVIES + 1
    scores = 1 + (users + movies + rng.integers(0, 3, RATINGS)) % 5
    times = 880_000_000 + np.arange(RATINGS) * 1000
    for name, delimiter, lines in (
        ("u.user", "|", people),
        ("u.item", "|", films),
        ("u.data", "\t", zip(users, movies, scores, times, strict=True)),
    ):
        text = (delimiter.join(map(str, line)) for line in lines)
        write_once(folder / name, text)
    return folder


def columns(name, delimiter, *kinds):
    """The columns of a file."""
    file = str(write() / name)
    read = tf.data.experimental.CsvDataset(file, kinds, field_delim=delimiter)
    rows = list(read.as_numpy_iterator())
    return [np.array(column) for column in zip(*rows, strict=True)]


@functools.cache
def features():
    """Of every rating, by the names of TensorFlow Datasets; and the titles."""
    text, number = tf.string, tf.int64
    user, movie, score, time = columns("u.data", "\t", *[number] * 4)
    _, age, sex, job, code = columns(
        *("u.user", "|", number, number, text, text, text)
    )
    _, titles = columns("u.item", "|", number, text)
    of_age = AGES[np.searchsorted(AGES, age, side="right") - 1]
    return {
        "user_id": user.astype(bytes),
        "movie_id": movie.astype(bytes),
        "movie_title": titles[movie - 1],
        "user_rating": score.astype(np.float32),
        "timestamp": time,
        "user_gender": (sex == b"M")[user - 1].astype(np.int64),
        "user_zip_code": code[user - 1],
        "user_occupation_text": job[user - 1],
        "bucketized_user_age": of_age[user - 1],
    }, titles


def ratings(*names):
    """A dataset of some features, and all of their values by name."""
    known, titles = features()
    some = {name: known[name] for name in names}
    return tf.data.Dataset.from_tensor_slices(some), known, titles


def write_sequences():
    """A file of lists: an occupation, four movies and their ratings."""
    known, _ = features()
    lines = []
    for first in range(0, RATINGS - 3, 2):
        some = slice(first, first + 4)
        movies = b",".join(known["movie_title"][some]).decode()
        scores = ",".join(map(str, known["user_rating"][some]))
        job = known["user_occupation_text"][first].decode()
        lines.append(f"{job}|{movies}|{scores}")
    return write_once(write() / "sequences.csv", lines)


def write_cover_types(numbers, names, classes):
    """A file of numbers, names and a class, with a header."""
    rng = np.random.default_rng(4)
    lines = [",".join([*numbers, *names, "Cover_Type"])]
    for _ in range(RATINGS):
        row = [*rng.integers(0, 360, len(numbers))]
        row += [rng.choice(each) for each in names.values()]
        lines.append(",".join(map(str, [*row, rng.integers(0, classes)])))
    return write_once(write() / "cover_types.csv", lines)
