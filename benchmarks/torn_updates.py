# SPDX-License-Identifier: Apache-2.0
"""Shows why an update of a row must be atomic, with all its slots.

    python -m benchmarks.torn_updates --chart docs/torn_updates.svg

A matrix factorization is trained by Adam in NumPy. Four workers compute
gradients from the weights at the start of a step. Three ways to apply them:

- synchronous: one update with the mean of the gradients, as `BSP`.
- atomic: one update after the other, as the owner of a row does with `SSP` and
  `BAP` (tests/process/test_asynchronous.py compares that with a serial log).
- torn: like atomic, but of rows that two workers update, a few updates see the
  first moment of the other update and no second moment yet. This simulates
  slots that are tables of their own, whose rows are inserted one by one.

A torn update divides the moment of a large gradient by that of a small one, so
its step has no bound. The program prints the largest norm of a row.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

WAYS = ("synchronous", "atomic", "torn")
USERS, ITEMS, WIDTH, WORKERS = 2000, 1000, 8, 4
FIRST, SECOND, EPSILON = 0.9, 0.999, 1e-7


class Table:
    """Rows with the slots of Adam.

    Args:
        rows: number of rows.
        random: draws the initial values.
    """

    def __init__(self, rows: int, random: np.random.Generator) -> None:
        self.rows = random.normal(0, 0.1, [rows, WIDTH])
        self.first = np.zeros([rows, WIDTH])
        self.second = np.zeros([rows, WIDTH])

    def update(
        self,
        places: np.ndarray,
        gradients: np.ndarray,
        rate: float,
        torn: np.ndarray | None = None,
    ) -> None:
        """Makes one update of unique rows.

        Args:
            places: int `[n]`, the rows.
            gradients: `[n, WIDTH]`.
            rate: learning rate.
            torn: rows whose second moment is missing; None for none.
        """
        second = self.second[places]
        if torn is not None:
            second[np.isin(places, torn)] = 0
        first = FIRST * self.first[places] + (1 - FIRST) * gradients
        second = SECOND * second + (1 - SECOND) * gradients**2
        self.first[places], self.second[places] = first, second
        self.rows[places] -= rate * first / (np.sqrt(second) + EPSILON)


def summed(
    places: np.ndarray, gradients: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Unique rows, and the sums of their gradients."""
    unique, which = np.unique(places, return_inverse=True)
    sums = np.zeros([len(unique), WIDTH])
    np.add.at(sums, which, gradients)
    return unique, sums


def train(
    way: str, steps: int, batch: int, rate: float, share: float, seed: int
) -> np.ndarray:
    """Trains, and returns the largest norm of a row after each step.

    Args:
        way: one of `WAYS`.
        steps: number of steps.
        batch: samples of a worker in a step.
        rate: learning rate.
        share: share of the updates of common rows that are torn.
        seed: seed of data and initial values.
    """
    random = np.random.default_rng(seed)
    truth = np.random.default_rng(17)
    traits = [truth.normal(0, 0.6, [n, WIDTH]) for n in (USERS, ITEMS)]
    tables = [Table(n, random) for n in (USERS, ITEMS)]
    norms = []
    for _ in range(steps):
        parts = []
        for _ in range(WORKERS):
            users = random.zipf(1.3, batch) % USERS
            items = random.zipf(1.3, batch) % ITEMS
            wanted = (traits[0][users] * traits[1][items]).sum(1)
            x, y = tables[0].rows[users], tables[1].rows[items]
            error = ((x * y).sum(1) - wanted)[:, None] / batch
            parts.append(((users, error * y), (items, error * x)))
        for side, table in enumerate(tables):
            updates = [summed(*part[side]) for part in parts]
            _apply(table, updates, way, rate, share, random)
        largest = max(np.linalg.norm(t.rows, axis=1).max() for t in tables)
        norms.append(largest)
        if not np.isfinite(largest):
            break
    return np.array(norms)


def _apply(
    table: Table,
    updates: list[tuple[np.ndarray, np.ndarray]],
    way: str,
    rate: float,
    share: float,
    random: np.random.Generator,
) -> None:
    if way == "synchronous":
        places = np.concatenate([places for places, _ in updates])
        gradients = np.concatenate([gradients for _, gradients in updates])
        unique, sums = summed(places, gradients / WORKERS)
        return table.update(unique, sums, rate)
    seen = np.zeros(len(table.rows), bool)
    for places, gradients in updates:
        torn = None
        if way == "torn":
            common = places[seen[places]]
            torn = common[random.random(len(common)) < share]
        # Each update has a share of the rate: there are `WORKERS` of them.
        table.update(places, gradients, rate / WORKERS, torn)
        seen[places] = True
    return None


def draw(path: pathlib.Path, norms: dict[str, np.ndarray]) -> None:
    """Draws the norms over the steps."""
    import matplotlib as mpl
    from matplotlib import figure

    sheet = figure.Figure((6.4, 3.2), layout="constrained")
    axes = sheet.subplots()
    for way, values in norms.items():
        axes.semilogy(np.arange(1, len(values) + 1), values, label=way)
    axes.set_xlabel("step")
    axes.set_ylabel("largest norm of a row")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylim(0.1, 1e6)
    rc = {"svg.hashsalt": path.name, "svg.fonttype": "none"}
    with mpl.rc_context(rc):
        sheet.savefig(path, metadata={"Date": None})


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=2000)
    add("--batch", type=int, default=64, help="samples of a worker")
    add("--rate", type=float, default=0.01)
    add("--share", type=float, default=0.001, help="of updates that are torn")
    add("--seed", type=int, default=0)
    add("--chart", type=pathlib.Path, help="file of a chart")
    return parser


def main() -> None:
    """Trains in all ways, prints norms, and draws them."""
    options = make_parser().parse_args()
    with np.errstate(all="ignore"):  # Numbers overflow where it diverges.
        norms = {
            way: train(
                *(way, options.steps, options.batch, options.rate),
                *(options.share, options.seed),
            )
            for way in WAYS
        }
    print(f"{'way':<12}{'steps':>7}{'largest norm':>14}{'at the end':>12}")
    for way, values in norms.items():
        largest = np.nanmax(values)
        print(f"{way:<12}{len(values):>7}{largest:>14.3g}{values[-1]:>12.3g}")
    if options.chart is not None:
        draw(options.chart, norms)


if __name__ == "__main__":
    main()
