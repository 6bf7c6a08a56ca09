# SPDX-License-Identifier: Apache-2.0
"""A file or folder that all ranks write and that is put into place once.

Writers of Keras and TensorFlow know nothing of ranks. All ranks run them, for
reading a table or a summed variable is an exchange; only what rank 0 wrote
stays. It is written into a temporary folder beside its place and moved when
all ranks are done, so a failure leaves what was there before.
"""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import tempfile
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from tfdist_ext.collectives.collectives import Collectives


def write_once(
    collectives: Collectives,
    filepath: Any,
    write: Callable[[Any], Any],
    make_folder: bool = False,
    stays: bool | None = None,
) -> Any:
    """Lets all ranks write, and keeps what rank 0 wrote.

    Args:
        collectives: of the strategy; every rank must call.
        filepath: where to: a path, or an object open for writing bytes. That
            of rank 0 counts; nothing is written to those of other ranks.
        write: called with where to write instead.
        make_folder: whether the folder that is to hold the file is made.
        stays: whether what this rank wrote does; default on rank 0 only.

    Returns:
        What `write` returned.

    Raises:
        OSError: if rank 0 cannot write. Whatever a rank fails with ends the
            call on all of them, with nothing changed.
    """
    if stays is None:
        stays = collectives.group.rank == 0
    is_path = isinstance(filepath, str | os.PathLike)
    what = f"'{os.fspath(filepath)}'" if is_path else "a file object"
    with collectives.together(f"save {what}"):
        with _place(filepath, make_folder, stays) as (own, put):
            result = write(own)
            collectives.barrier("file/written")
            put()
        # Not before rank 0's temporary folder is gone.
        collectives.barrier("file/placed")
    return result


@contextlib.contextmanager
def _place(
    filepath: Any, make_folder: bool, stays: bool
) -> Iterator[tuple[Any, Callable[[], None]]]:
    """Where this rank writes, and how that is put into place."""
    if isinstance(filepath, io.IOBase):
        yield filepath if stays else io.BytesIO(), _nothing
    elif stays and is_remote(filepath):
        # Not renamed there: Keras and TensorFlow write to such places at
        # the end, when they have everything.
        yield str(filepath), _nothing
    elif stays:
        path = pathlib.Path(filepath)
        _check_folder(path, make_folder)
        with tempfile.TemporaryDirectory(
            prefix=f".writing-{path.name}-", dir=path.parent
        ) as scratch:
            yield (
                str(pathlib.Path(scratch) / path.name),
                lambda: _move_all(pathlib.Path(scratch), path),
            )
    else:
        with tempfile.TemporaryDirectory() as scratch:
            name = pathlib.Path(filepath).name
            yield str(pathlib.Path(scratch) / name), _nothing


def is_remote(filepath: Any) -> bool:
    """Whether a path is one of TensorFlow's other file systems."""
    return "://" in str(filepath)


def _nothing() -> None:
    pass


def _check_folder(path: pathlib.Path, make_folder: bool) -> None:
    if make_folder:
        path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"'{path}' cannot be written: there is no folder "
            f"'{path.parent}'. Make it first."
        )


def _move_all(scratch: pathlib.Path, path: pathlib.Path) -> None:
    """Moves files to beside `path`, the one of its name last.

    What else is in a folder that is there already stays.
    """
    found = sorted(
        scratch.rglob("*"), key=lambda p: (p.is_file(), p.name == path.name, p)
    )
    for source in found:
        target = path.parent / source.relative_to(scratch)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            os.replace(source, target)
