# SPDX-License-Identifier: Apache-2.0
"""Trains the records of a growing folder until none has come for a while.

stream_program.py FOLDER RECORDS WAIT

It may be killed at any time. Its end prints how often records were trained.
"""

import pathlib
import sys

import numpy as np
from stream_models import counts
from stream_models import make_counter
from stream_models import parse

import tfdist_ext
from tfdist_ext.callbacks import Resume
from tfdist_ext.callbacks import resume
from tfdist_ext.data import PositionedDataset


def main():
    folder, records = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    resume.HEARTBEAT_SECONDS = 0  # saves often
    strategy = tfdist_ext.HybridParallelStrategy()
    model = make_counter(strategy, records)
    stream = PositionedDataset.from_files(folder / "data", "tfrecord")
    data = stream.batches(8, wait=float(sys.argv[3]), linger=0.1)
    saved = Resume(folder / "run", every=5)
    model.fit(data.map(parse), verbose=0, callbacks=[saved])
    found, times = np.unique(
        np.round(counts(strategy, model), 3), return_counts=True
    )
    if strategy.rank == 0:
        told = dict(zip(found.tolist(), times.tolist(), strict=True))
        print("trained:", told, flush=True)


if __name__ == "__main__":
    main()
