# SPDX-License-Identifier: Apache-2.0
"""The metrics of `tfdist_ext.metrics`, written as their definitions are.

Loops over samples and pairs, with numpy and without TensorFlow.
"""

import numpy as np


def ne(labels, chances, weights):
    """Cross-entropy, divided by that of the mean label."""

    def entropy(y, p, w):
        return -w * (y * np.log2(p) + (1 - y) * np.log2(1 - p))

    mean = np.average(labels, weights=weights)
    rows = list(zip(labels, chances, weights, strict=True))
    of_model = sum(entropy(y, p, w) for y, p, w in rows)
    return of_model / sum(entropy(y, mean, w) for y, _, w in rows)


def calibration(labels, chances, weights):
    """Predicted positives, divided by actual ones."""
    return np.dot(chances, weights) / np.dot(labels, weights)


def ece(labels, chances, weights, bins):
    """The mean distance of prediction and rate, over bins of probability."""
    error = 0.0
    for i in range(bins):
        inside = (chances >= i / bins) & (chances < (i + 1) / bins)
        if i == bins - 1:
            inside |= chances == 1.0
        if weights[inside].sum() > 0:
            predicted = np.average(chances[inside], weights=weights[inside])
            rate = np.average(labels[inside], weights=weights[inside])
            error += weights[inside].sum() * abs(predicted - rate)
    return error / weights.sum()


def area(labels, chances, weights):
    """The AUC: the weight of the pairs in order; None without any pair."""
    won = pairs = 0.0
    for y, p, w in zip(labels, chances, weights, strict=True):
        for other, q, v in zip(labels, chances, weights, strict=True):
            if y == 1 and other == 0:
                pairs += w * v
                won += w * v * ((p > q) + 0.5 * (p == q))
    return won / pairs if pairs else None


def gauc(labels, chances, weights, groups, weighting):
    """The mean AUC of the groups that have one."""
    areas, shares = [], []
    for group in np.unique(groups):
        own = groups == group
        found = area(labels[own], chances[own], weights[own])
        if found is not None:
            areas.append(found)
            share = {
                "samples": weights[own].sum(),
                "positives": (weights * labels)[own].sum(),
                "groups": 1.0,
            }
            shares.append(share[weighting])
    return np.average(areas, weights=shares)


def ranking(kind, relevant, found, weights, k):
    """A metric of found items; -1 is no item.

    Args:
        kind: "recall", "hit", "mrr" or "ndcg".
        relevant: items of each query.
        found: items of each query, the best first.
        weights: of the queries.
        k: how many items count.
    """
    total = count = 0.0
    for row, items, weight in zip(relevant, found, weights, strict=True):
        wanted = {item for item in row if item != -1}
        if not wanted:
            continue
        ranks = [i + 1 for i, item in enumerate(items[:k]) if item in wanted]
        gains = [1 / np.log2(rank + 1) for rank in ranks]
        best = [1 / np.log2(i + 2) for i in range(min(k, len(wanted)))]
        value = {
            "recall": len(ranks) / len(wanted),
            "hit": float(bool(ranks)),
            "mrr": 1 / ranks[0] if ranks else 0.0,
            "ndcg": sum(gains) / sum(best),
        }
        total += weight * value[kind]
        count += weight
    return total / count


def coverage(found, weights, k, items):
    """The share of items that some query has found."""
    seen = {item for row in found[weights > 0] for item in row[:k]}
    return len(seen) / items
