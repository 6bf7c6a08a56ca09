# SPDX-License-Identifier: Apache-2.0
"""How far results are from the oracle's, and how far they may be."""

import numpy as np

# Largest difference from the oracle, relative to the largest change that
# training makes. fp32 sums in another order; 16-bit wires round.
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2}


def change_error(
    got: tuple[np.ndarray, ...],
    want: tuple[np.ndarray, ...],
    initial: tuple[np.ndarray, ...],
) -> float:
    """Largest |got - want| of an array over its largest |want - initial|.

    What the rounding of the values themselves explains is not an error: a
    weight of 0.1 that moves by 1e-5 keeps three digits of its change.
    """
    errors = []
    for one, other, start in zip(got, want, initial, strict=True):
        rounding = 4 * np.finfo(np.float32).eps * np.abs(other)
        excess = np.maximum(np.abs(one - other) - rounding, 0.0)
        change = np.abs(other - start).max(initial=0.0)
        # NaN must not be lost: np.maximum and max() of an array keep it.
        errors.append(excess.max(initial=0.0) / change)
    return float(np.max(errors))


def problem(errors: dict[str, float], *wire_dtypes: str) -> str:
    """Says which error is beyond its limit, or returns ""."""
    tolerance = max(TOLERANCES[dtype] for dtype in wire_dtypes)
    limits = dict.fromkeys(errors, tolerance) | {"bystanders": 0.0}
    for name, error in errors.items():
        # Written so that NaN fails.
        if not error <= limits[name]:
            return (
                f"differs from the single-process reference: {name} by "
                f"{error:.2g}, allowed {limits[name]:.2g}"
            )
    return ""
