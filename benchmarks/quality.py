# SPDX-License-Identifier: Apache-2.0
"""Quality on ml-100k at several numbers of ranks, beside published figures.

    python -m benchmarks.quality --data FOLDER

Trains every model of `examples/quality/train.py` with seed 0 at each number of
ranks and in one process of stock Keras, and with more seeds at 1 rank. The seed
draws the split, the order and the initial rows, so a run at 4 ranks has the
data of the run at 1 rank. FOLDER has the files that the package `recbole` 1.2.1
ships (`ml-100k.inter`, `.user` and `.item`); an installed `recbole` is found.

Columns: the published figure; the mean at 1 rank over the seeds and, after +-,
their standard deviation; and of seed 0, stock Keras and each number of ranks.
`--record` appends each run to a file of JSON lines; runs that it has are not
made again.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PROGRAM = _ROOT / "examples" / "quality" / "train.py"
_RECBOLE = "RecBole"


@dataclasses.dataclass(frozen=True)
class Published:
    """A published figure.

    Attributes:
        model: model of `examples/quality/train.py`.
        metric: name of the metric.
        text: the figure, as it was published.
        source: who has published it.
    """

    model: str
    metric: str
    text: str
    source: str


PUBLISHED = (
    Published("LR", "AUC", "0.7765", _RECBOLE),
    Published("LR", "logloss", "0.5620", _RECBOLE),
    Published("FM", "AUC", "above LR", ""),
    Published("FM", "logloss", "", ""),
    Published("DeepFM", "AUC", "above LR", ""),
    Published("DeepFM", "logloss", "", ""),
    Published("DCNv2", "AUC", "above LR", ""),
    Published("DCNv2", "logloss", "", ""),
    Published("BPR", "recall@10", "0.2523", _RECBOLE),
    Published("BPR", "NDCG@10", "0.2920", _RECBOLE),
    Published("GRU4Rec", "hit@10", "0.1103", _RECBOLE),
    Published("GRU4Rec", "NDCG@10", "0.0513", _RECBOLE),
    Published("SASRec", "hit@10", "above GRU4Rec", ""),
    Published("SASRec", "NDCG@10", "above GRU4Rec", ""),
    Published("SVD", "RMSE", "0.934", "Surprise"),
    Published("SVD++", "RMSE", "0.919", "Surprise"),
    Published("RatingFM", "RMSE", "0.8959 to 0.9032", "myFM"),
)
STOCK = 0  # Number of ranks of stock Keras in the records.


def run_once(
    model: str, ranks: int, seed: int, data: str | None
) -> dict[str, Any]:
    """Trains one model; the metrics that it prints, and the seconds.

    Args:
        model: name of the model.
        ranks: number of ranks; `STOCK` for stock Keras in one process.
        seed: of split, order and weights.
        data: folder with the files, or None.

    Raises:
        subprocess.CalledProcessError: the program failed.
    """
    start = [sys.executable]
    if ranks > 1:
        start = [*start, "-m", "tfdist_ext.launch", "-n", str(ranks)]
    options = ["--seed", str(seed)]
    options += ["--stock"] if ranks == STOCK else []
    options += ["--data", data] if data else []
    begin = time.monotonic()
    done = subprocess.run(
        [*start, str(_PROGRAM), model, *options],
        check=True,
        capture_output=True,
        text=True,
    )
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("{")]
    found: dict[str, Any] = json.loads(line)
    seconds = round(time.monotonic() - begin, 1)
    return {**found, "ranks": ranks, "seed": seed, "seconds": seconds}


def runs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of all runs, from the file or made now."""
    path = pathlib.Path(arguments.record) if arguments.record else None
    known = {}
    if path is not None and path.exists():
        for line in path.read_text().splitlines():
            record = json.loads(line)
            known[record["model"], record["ranks"], record["seed"]] = record
    wanted = [(ranks, 0) for ranks in (1, STOCK, *arguments.ranks)]
    wanted += [(1, seed) for seed in range(arguments.seeds)]
    for ranks, seed in dict.fromkeys(wanted):
        for model in arguments.models:
            record = known.get((model, ranks, seed))
            if record is None and arguments.recorded:
                continue
            if record is None:
                record = run_once(model, ranks, seed, arguments.data)
                print(json.dumps(record), file=sys.stderr, flush=True)
                if path is not None:
                    with path.open("a") as file:
                        file.write(json.dumps(record) + "\n")
            yield record


def table(records: list[dict[str, Any]], ranks: list[int]) -> list[str]:
    """Lines of a Markdown table.

    Args:
        records: those of `run_once`.
        ranks: numbers of ranks, one for each column after stock Keras.
    """
    values: dict[tuple[str, str, int], dict[int, float]]
    values = collections.defaultdict(dict)
    for record in records:
        for metric, value in record.items():
            key = record["model"], metric, record["ranks"]
            values[key][record["seed"]] = value
    counts = [f"{count} rank{'s' * (count > 1)}" for count in ranks]
    heads = [
        "model",
        "metric",
        "published",
        "1 rank, all seeds",
        "stock Keras",
        *counts,
    ]
    lines = [_row(heads), _row(["---"] * len(heads))]
    for each in PUBLISHED:
        seeds = list(values[each.model, each.metric, 1].values())
        found = [
            values[each.model, each.metric, count].get(0)
            for count in (STOCK, *ranks)
        ]
        if seeds:
            source = f" ({each.source})" if each.source else ""
            texts = ["" if x is None else f"{x:.4f}" for x in found]
            published = each.text + source
            cells = [each.model, each.metric, published, _spread(seeds)]
            lines.append(_row([*cells, *texts]))
    return lines


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float]) -> str:
    mean = f"{statistics.mean(values):.4f}"
    if len(values) == 1:
        return mean
    return f"{mean} +- {statistics.stdev(values):.4f}"


def make_parser() -> argparse.ArgumentParser:
    """Creates the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    models = list(dict.fromkeys(each.model for each in PUBLISHED))
    add = parser.add_argument
    add("--models", nargs="+", choices=models, default=models, metavar="NAME")
    add("--ranks", nargs="+", type=int, default=[1, 2, 4], metavar="N")
    add("--seeds", type=int, default=3, help="number of seeds at 1 rank")
    add("--data", metavar="FOLDER", help="with ml-100k.inter")
    add("--recorded", action="store_true", help="print what --record has")
    add("--record", metavar="FILE", help="JSON lines, read and appended to")
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    records = list(runs(arguments))
    print("\n".join(table(records, arguments.ranks)))


if __name__ == "__main__":
    main()
