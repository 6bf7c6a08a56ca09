# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a folder, by the step that they were made at."""

from __future__ import annotations

import re

import tensorflow as tf

gfile = tf.io.gfile

_INDEX = re.compile(r"ckpt-(\d+)\.index")
_UNFINISHED = re.compile(r"ckpt-\d+_ranks/?")


def path_of(folder: str, step: int) -> str:
    """Where the checkpoint of a step lies."""
    return f"{folder}/ckpt-{step}"


def steps_in(folder: str) -> list[int]:
    """The steps of which there are checkpoints, the last one first."""
    if not gfile.isdir(folder):
        return []
    found = map(_INDEX.fullmatch, gfile.listdir(folder))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def keep(folder: str, most: int) -> None:
    """Removes all but the last checkpoints, and says which is the last.

    Args:
        folder: of the checkpoints.
        most: that are left.
    """
    steps = steps_in(folder)
    for step in steps[most:]:
        path = path_of(folder, step)
        gfile.remove(f"{path}.index")  # without which the rest is nothing
        for data in gfile.glob(f"{path}.data-*"):
            gfile.remove(data)
    # What `tf.train.latest_checkpoint` reads.
    names = [f"ckpt-{step}" for step in reversed(steps[:most])]
    lines = [f'model_checkpoint_path: "{names[-1]}"']
    lines += [f'all_model_checkpoint_paths: "{name}"' for name in names]
    with gfile.GFile(f"{folder}/checkpoint.part", "w") as file:
        file.write("\n".join([*lines, ""]))
    gfile.rename(
        f"{folder}/checkpoint.part", f"{folder}/checkpoint", overwrite=True
    )


def remove_unfinished(folder: str) -> None:
    """Removes what saves have left that were interrupted."""
    if gfile.isdir(folder):
        for name in gfile.listdir(folder):
            if _UNFINISHED.fullmatch(name):
                gfile.rmtree(f"{folder}/{name}")
