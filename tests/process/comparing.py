# SPDX-License-Identifier: Apache-2.0
"""What several ranks trained, compared with one process."""

import dataclasses
import pathlib

import numpy as np
from launching import run_ranks

# Results by the names of their cases, then by their own.
Results = dict[str, dict[str, np.ndarray]]

# Only ours has these: what training starts from.
OURS_ONLY = ("initial/",)


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """What a program trains in one process, to compare several ranks with.

    Attributes:
        program: file name, of a program with the command line of `cases.py`.
        keras: 3 or 2 (tf_keras).
        folder: where results are written.
        ours: results of all cases.
        stock: results of stock ops, of some cases.
    """

    program: str
    keras: int
    folder: pathlib.Path
    ours: Results
    stock: Results

    @classmethod
    def train(cls, program, keras, folder, cases, own_rules=()):
        """Runs the program with ours, then with stock ops from equal tables.

        Args:
            program: see the class.
            keras: see the class.
            folder: see the class.
            cases: for both.
            own_rules: more cases, whose rules stock ops do not have.
        """
        output, everything = folder / "single.npz", [*cases, *own_rules]
        run_ranks(program, 1, output, *everything, keras=keras)
        initial = output.with_suffix(".0.npz")
        twin = folder / "stock.npz"
        run_ranks(program, 1, twin, *cases, "--stock", initial, keras=keras)
        ours = load(output, 0, everything)
        stock = load(twin, 0, cases)
        for case in cases:
            missing = set(ours[case]) - set(stock[case])
            assert all(name.startswith(OURS_ONLY) for name in missing), missing
            for name, value in stock[case].items():
                error = largest_error(ours[case][name], value)
                assert error <= 1e-5, (case, name, error)
        return cls(program, keras, folder, ours, stock)

    def check(self, ranks, cases):
        """Trains on some ranks: they agree bit for bit, and with one to 1e-5.

        Args:
            ranks: how many.
            cases: some of those of `ours`.
        """
        output = self.folder / f"ranks{ranks}.npz"
        run_ranks(self.program, ranks, output, *cases, keras=self.keras)
        first, *others = (load(output, rank, cases) for rank in range(ranks))
        for case in cases:
            single = self.ours[case]
            assert set(first[case]) == set(single), case
            expected = {**single, **self.stock.get(case, {})}
            for name, value in first[case].items():
                if name.startswith("initial/"):
                    np.testing.assert_array_equal(value, single[name], name)
                error = largest_error(value, expected[name])
                assert error <= 1e-5, (case, name, error)
        for other in others:
            for case in cases:
                assert set(other[case]) == set(first[case]), case
                for name, value in other[case].items():
                    np.testing.assert_array_equal(
                        value, first[case][name], f"{case}/{name}"
                    )


def load(output, rank, cases):
    """What a rank has written; something of every case, and of no other.

    Args:
        output: the path that the ranks were given.
        rank: whose results.
        cases: that it was given.
    """
    results = {case: {} for case in cases}
    with np.load(output.with_suffix(f".{rank}.npz")) as file:
        for name, value in file.items():
            # "row/sgd/regularized" is a case, and so is "row/sgd".
            case = max((c for c in cases if name.startswith(f"{c}/")), key=len)
            results[case][name.removeprefix(f"{case}/")] = value
    assert all(results.values()), [c for c in cases if not results[c]]
    return results


def largest_error(actual, expected):
    """Largest difference, relative to the largest value."""
    scale = max(np.abs(expected).max(), 1e-12)
    return np.abs(actual - expected).max() / scale
