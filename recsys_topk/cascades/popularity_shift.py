"""How the popularity of items at the end of the training data differs from that in all of it."""

from __future__ import annotations

import numpy as np

from recsys_topk.types import Array

NEWEST = 0.1  # share of the interactions on which half-life and prior are chosen
HALF_LIVES = [2.0**-n for n in range(1, 9)]  # shares of the time of the training data
PRIORS = (10, 100, 1_000, 10_000)  # interactions


def popularity_shift(user: Array, item: Array, time: Array, size: int) -> Array:
    """Return log(p_end(i) / p(i)) of each item i, (V,): the correction of a model of p for a time after the training.

    p(i) is the share of item i among the n interactions, and p_end(i) = (sum of w over its interactions + s p(i)) /
    (sum of w + s), where w = 2^(-age / h). The half-life h and the prior s are those under which the newest tenth of
    the interactions is most likely, given the others; each user counts the same, as in evaluation. The shift is 0 if
    none is better than p. Cost: O(n log n).

    Args:
        user: (n,) integers.
        item: (n,) the item of each interaction, below `size`.
        time: (n,) its time.
        size: Number of items, V.

    Example:
        >>> shift = popularity_shift(np.arange(2000) % 7, np.repeat([0, 1], 1000), np.arange(2000), 3)
        >>> bool(shift[0] < -1), bool(shift[1] > 0.5), bool(abs(shift[2]) < 1e-9)
        (True, True, False)
        >>> popularity_shift(np.arange(2000) % 7, np.tile([0, 1], 1000), np.arange(2000), 2).round(2).tolist()
        [0.0, 0.0]
    """
    order = np.argsort(time, kind="stable")
    item, time = item[order], time[order].astype(np.float64)
    cut = item.size - int(item.size * NEWEST)
    if not 0 < cut < item.size:
        return np.zeros(size)
    later, best, chosen = item[cut:], 0.0, None
    _, place, number = np.unique(user[order][cut:], return_inverse=True, return_counts=True)
    equal = 1 / (number.size * number[place])
    for half_life in HALF_LIVES:
        share, recent, total = _shares(item[:cut], time[:cut], size, half_life)
        for prior in PRIORS:
            gain = float(np.log((recent + prior * share) / ((total + prior) * share))[later] @ equal)
            if gain > best:
                best, chosen = gain, (half_life, prior)
    if chosen is None:
        return np.zeros(size)
    share, recent, total = _shares(item, time, size, chosen[0])
    shift: Array = np.log((recent + chosen[1] * share) / ((total + chosen[1]) * share))
    return shift


def _shares(item: Array, time: Array, size: int, half_life: float) -> tuple[Array, Array, float]:
    """Return p, with half an interaction more per item, and the sum of w of each item and of all."""
    number = np.bincount(item, minlength=size) + 0.5
    weight = np.exp2((time - time[-1]) / (half_life * max(time[-1] - time[0], 1.0)))
    return number / number.sum(), np.bincount(item, weight, minlength=size), float(weight.sum())
