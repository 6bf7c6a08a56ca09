# SPDX-License-Identifier: Apache-2.0
"""Every record of a stream is trained once, however training ends."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest
from stream_models import tf_record

pytestmark = pytest.mark.process
HERE = pathlib.Path(__file__).parent


@pytest.mark.parametrize("file_format", ["tfrecord", "csv"])
@pytest.mark.parametrize(
    ("begun", "ended", "keras"), [(2, 1, 3), (1, 3, 2), (3, 2, 3)]
)
def test_records_of_files_count_once(
    run_scenario, begun, ended, keras, file_format
):
    steps = random.sample(range(2, 10), 2)
    print("fails after", steps)
    begin, end = "stream_scenarios.begin", "stream_scenarios.end"
    run_scenario(begin, file_format, steps[0], ranks=begun, keras=keras)
    run_scenario(begin, file_format, steps[1], ranks=begun, keras=keras)
    run_scenario(end, ranks=ended, keras=keras)


RECORDS = 3000


def start(ranks, folder, wait):
    """Starts ranks of the program in a process group of their own."""
    command = "from tfdist_ext.launch.command import main; main()"
    program = [sys.executable, "-c", command, "-n", str(ranks)]
    arguments = [HERE / "stream_program.py", folder, str(RECORDS), str(wait)]
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def append(folder, stop):
    """Appends records by pieces, to one file after another."""
    texts = [tf_record(str(each)) for each in range(RECORDS)]
    for first in range(0, RECORDS, 1000):
        data = b"".join(texts[first : first + 1000])
        with (folder / f"{first:05}.tfrecord").open("ab") as file:
            for start in range(0, len(data), 997):
                file.write(data[start : start + 997])
                file.flush()
                stop.wait(0.3)


@pytest.mark.slow
def test_records_count_once_though_all_ranks_are_killed(tmp_path):
    (tmp_path / "data").mkdir()
    stop = threading.Event()
    writer = threading.Thread(target=append, args=[tmp_path / "data", stop])
    writer.start()
    try:
        for ranks in (2, 3):
            before = set(tmp_path.glob("run/ckpt-*.index"))
            with start(ranks, tmp_path, 60) as process:
                deadline = time.monotonic() + 200
                while not set(tmp_path.glob("run/ckpt-*.index")) - before:
                    assert time.monotonic() < deadline
                    assert process.poll() is None
                    time.sleep(0.05)
                time.sleep(random.uniform(0, 2))
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(1)
    finally:
        stop.set()
        writer.join()
    with start(1, tmp_path, 2) as process:
        told, _ = process.communicate(timeout=200)
    assert told.splitlines()[-1] == f"trained: {{1.0: {RECORDS}}}", told
