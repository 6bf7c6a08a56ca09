# SPDX-License-Identifier: Apache-2.0
"""A rank of `launch.notebook`: `python -m tfdist_ext.launch.rank_of_python`."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import pickle
import sys
import time
import traceback
from typing import Any

from tfdist_ext.launch import from_python


def main(folder: pathlib.Path) -> int:
    """Calls the function of a folder, and writes its result or its error.

    Args:
        folder: the folder that `from_python.notebook` has made.

    Returns:
        The exit code.
    """
    rank = int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    if rank:
        path = folder / from_python.output_file(rank)
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
    try:
        call = (folder / from_python.CALL).read_bytes()
        result = _called(call)
        if rank == 0:
            _write(folder / from_python.RESULT, _pickled(result))
    except Exception as error:
        failure = from_python.Failure(
            time.time_ns(),
            type(error).__name__,
            str(error),
            traceback.format_exc(),
            type(error).__name__ in ("AbortedError", "UnavailableError"),
        )
        written = pickle.dumps(dataclasses.asdict(failure))
        _write(folder / from_python.error_file(rank), written)
        return 1
    return 0


def _called(call: bytes) -> Any:
    # The function's module may be found by the path of the notebook only.
    path, pickled = pickle.loads(call)
    sys.path[:] = path
    fn, args = pickle.loads(pickled)
    return fn(*args)


def _pickled(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result of rank 0, {type(result).__name__}, cannot be "
            f"pickled: {error}. Return numbers, arrays or dicts of these "
            "(such as history.history), and save models to files."
        ) from error


def _write(path: pathlib.Path, data: bytes) -> None:
    partial = path.with_suffix(".part")
    partial.write_bytes(data)
    partial.replace(path)


if __name__ == "__main__":
    raise SystemExit(main(pathlib.Path(sys.argv[1])))
