# SPDX-License-Identifier: Apache-2.0
"""Options that send only some of the values of dense gradients.

    strategy = tfdist_ext.HybridParallelStrategy(
        compression=tfdist_ext.compression.TopK(0.01)
    )

Each step sends a share of the values of every gradient. Error feedback adds
the other values to the gradients of the next step, so they are late and not
lost. The trained numbers differ from those of one process by design.

Sources: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, NeurIPS 2018,
arXiv:1809.07599. Lin et al., Deep Gradient Compression, ICLR 2018,
arXiv:1712.01887, whose momentum correction, factor masking and warm-up of the
share are not part of this module.
"""

from __future__ import annotations

import dataclasses

from tfdist_ext.tables import checks

__all__ = ["RandomK", "TopK"]

# Below this share not even a gradient of 2^31 values would send two of them.
_LEAST_SHARE = 1e-9


@dataclasses.dataclass(frozen=True)
class TopK:
    """Each rank sends the values of largest magnitude, with their indices.

    A bucket of gradients (about 8 MiB, several variables) has n values. Each
    rank sends k = ceil(share * n) of them to every other rank, as 4 bytes of
    value and 4 bytes of index, and adds up what all ranks have sent. All ranks
    get bitwise equal sums. NaN counts as the largest magnitude.

    A rank sends (W - 1) * 8 * k bytes, W the number of ranks, in place of
    8 * n * (W - 1) / W. Fewer bytes are sent only if `share` < 1 / W; creating
    a strategy with a larger share warns.

    Without error feedback the sums are biased: values that are never among the
    largest are never trained. The error feedback keeps one float32 per value
    on each rank.

    Args:
        share: part of the values that is sent, above 0 and at most 1.
        error_feedback: whether the values that are not sent are added to the
            gradients of the next step.

    Raises:
        ValueError: an argument is invalid.
    """

    share: float
    error_feedback: bool = True

    def __post_init__(self) -> None:
        _check(self)


@dataclasses.dataclass(frozen=True)
class RandomK:
    """All ranks send the values of the same random indices.

    A bucket of n gradient values is divided into k = ceil(share * n) ranges of
    equal size (up to 1). Each step draws one index of every range, with a
    probability of 1 / size, from a counter that all ranks agree on. So only
    values are sent, by an all_reduce of k numbers, at any number of ranks:
    the bytes fall to `share` of those without compression.

    With error feedback the drawn values are sent as they are, and the others
    are added to the gradients of the next step. A value then waits for
    1 / share steps on average and arrives as the sum of that many gradients,
    so a small share needs a smaller learning rate. The error feedback keeps
    one float32 per value on each rank.

    Without error feedback the drawn values are multiplied by the size of their
    range (about 1 / share), so the expectation of the sum is exact and its
    variance is 1 / share - 1 times the square of the gradient.

    Args:
        share: part of the values that is sent, above 0 and at most 1.
        error_feedback: whether the values that are not sent are added to the
            gradients of the next step.

    Raises:
        ValueError: an argument is invalid.
    """

    share: float
    error_feedback: bool = True

    def __post_init__(self) -> None:
        _check(self)


Compression = TopK | RandomK


def _check(compression: Compression) -> None:
    where = type(compression).__name__
    share = compression.share
    checks.number("share", share, where, least=_LEAST_SHARE, most=1.0)
    checks.boolean(
        "error_feedback", compression.error_feedback, where, optional=False
    )
