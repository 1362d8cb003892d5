"""A list of a batch, copied and padded, and its k-th pair of scores.

Each list is first copied into a buffer. Masked items become -inf, and the list is padded with -inf to a multiple of
`WIDTH`, so that later loops need no mask and have no remainder. Arrays are given by their address.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import HALF, INFINITY, ONE, ZERO, f32, i32, number, ordered
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import bits_of, count, greatest, least, places, splat, total, where
from recsys_topk.ops.backends.compiled.memory import load, load_bits, load_where, read, store
from recsys_topk.ops.backends.task import FENCHEL_YOUNG, WIDTH


@inlined
def copy_list(x: Any, y: Any, mask: Any, n: Any, size: Any, above: Any, v: Any, s: Any) -> Any:
    """Copy a list: scores into v (-inf where masked), -1 for positives and 1 for others into s.

    Returns:
        Number of valid items, number of positives, smallest and largest score, and the mean and variance.
    """
    low, high = splat(INFINITY), splat(-INFINITY)
    sums, squares = splat(ZERO), splat(ZERO)
    positives, valid = i32(0), i32(0)
    shift = read(x, 0, f32) if mask == 0 or read(mask, 0, np.uint8) else ZERO
    for i in range(0, size, WIDTH):
        real = places(i32(i)) < i32(n)
        if mask != 0:
            real = load_bits(mask, i, real)
        value = load_where(x, i, real) + ZERO  # -0 becomes 0
        positive = (load_where(y, i, real) > above) & real
        low = where((value < low) & real, value, low)
        high = where((value > high) & real, value, high)
        moved = where(real, value - shift, ZERO)
        sums = sums + moved
        squares = squares + moved * moved
        valid += count(real)
        positives += count(positive)
        store(v, i, where(real, value, -INFINITY))
        store(s, i, where(positive, -ONE, ONE))
    share = ONE / f32(max(valid, i32(1)))
    mean = total(sums) * share
    return valid, positives, least(low), greatest(high), shift + mean, total(squares) * share - mean * mean


SMALLEST_TAIL = f32(2.0**-24)
DROPPED = i32(18)  # bits of a float32 that the table ignores; it keeps 5 bits of the mantissa
FIRST = i32(SMALLEST_TAIL.view(i32) >> DROPPED)


def _quantiles() -> Any:
    """Return z with P(Z > z) = p of a standard normal Z, and the density at z, for 32 values of p per factor of 2."""
    bits = np.arange(FIRST, (HALF.view(i32) >> DROPPED) + 1, dtype=i32) << DROPPED
    middles = (bits + (i32(1) << (DROPPED - i32(1)))).view(f32).astype(np.float64)
    middles[-1] = 0.5
    law = NormalDist()
    z = [-law.inv_cdf(p) for p in middles.tolist()]
    return np.array([[one, law.pdf(one)] for one in z], f32)


QUANTILES = _quantiles()


@inlined
def quantile(p: Any) -> Any:
    """Return (z, density at z) of the standard normal law with P(Z > z) = p, for a p that is up to 2% away."""
    tail = max(min(p, ONE - p), SMALLEST_TAIL)
    place = (bits_of(tail) >> DROPPED) - FIRST
    z = QUANTILES[place, 0]
    return (z if p < HALF else -z), QUANTILES[place, 1]


@inlined
def kth_pair(v: Any, size: Any, valid: Any, k: Any, low: Any, high: Any, guess: Any, slope: Any) -> Any:
    """Return (x_[k], x_[k+1]), 1 <= k < valid, by counting the scores above a moving bound.

    The bound starts at a guess, takes two Newton steps, then interpolates. From the 12th count on it bisects the
    integers between its bounds, so there are at most 45 counts, whatever the scores; 3 to 5 for scores of a bell shape.

    Args:
        v: Scores, -inf where masked.
        size: Length of v.
        valid: Number of valid scores.
        k: Rank of the first score of the pair.
        low: Smallest score.
        high: Largest score.
        guess: The first bound.
        slope: How far to move the bound per score that is above it in excess of k.
    """
    below, above = np.int64(ordered(low)) - 1, np.int64(ordered(high))
    over, under = valid, i32(0)  # number of scores above each of the two
    t = guess
    found = False
    for step in range(64):
        order = np.int64(ordered(t))
        if step >= 12 or not (below < order < above):
            order = (below + above) >> 1
            if order <= below:
                break
            t = number(i32(order))
        counted = i32(0)
        for i in range(0, size, WIDTH):
            counted += count(load(v, i) > t)
        if counted == k:
            found = True
            break
        if counted > k:
            below, over = order, counted
        else:
            above, under = order, counted
        if step < 2:
            t += f32(counted - k) * slope
        else:
            a, c = max(number(i32(below)), low), number(i32(above))
            t = a + (c - a) * (HALF if step % 3 == 2 else f32(over - k) / f32(over - under))
    if not found:  # no number lies between the bounds, so both scores are equal to the upper bound
        value = number(i32(above))
        return value, value
    kept, cut = splat(INFINITY), splat(-INFINITY)
    for i in range(0, size, WIDTH):
        value = load(v, i)
        up = value > t
        kept = where(up & (value < kept), value, kept)
        cut = where(up, cut, where(value > cut, value, cut))
    return least(kept), greatest(cut)


@inlined
def keep_best(y: Any, n: Any, size: Any, k: Any, positives: Any, s: Any, w: Any) -> None:
    """Keep in s only the k positives of a list with the largest labels, ties at the boundary included.

    Args:
        y: Labels, (n,).
        n: Number of places.
        size: Length of s and w.
        k: Number of positives to keep, less than `positives`.
        positives: Number of positives.
        s: -1 for the positives and 1 for the others, changed in place.
        w: Overwritten.
    """
    lows, highs = splat(INFINITY), splat(-INFINITY)
    for i in range(0, size, WIDTH):
        chosen = load(s, i) < ZERO
        value = load_where(y, i, places(i32(i)) < i32(n))
        lows = where(chosen & (value < lows), value, lows)
        highs = where(chosen & (value > highs), value, highs)
        store(w, i, where(chosen, value, -INFINITY))
    low, high = least(lows), greatest(highs)
    if low == high:  # all tie
        return
    # The k-th largest label. Grades have few different values, which are tried in turn; other labels need a search.
    label, reached = high, i32(0)
    for step in range(6):
        below = splat(-INFINITY)
        reached = i32(0)
        for i in range(0, size, WIDTH):
            value = load(w, i)
            enough = value >= label
            reached += count(enough)
            below = where(enough, below, where(value > below, value, below))
        if reached >= k or (step == 1 and i32(4) * reached < k):
            break
        label = greatest(below)
    if reached < k:
        spread = (high - low) / f32(positives)
        label, _ = kth_pair(w, size, positives, k, low, high, high - spread * f32(k), spread)
    for i in range(0, size, WIDTH):
        store(s, i, where(load(w, i) >= label, load(s, i), ONE))


@inlined
def begin_list(
    law: Any, x: Any, y: Any, mask: Any, n: Any, size: Any, wanted: Any, quota: Any, above: Any, v: Any, s: Any, w: Any
) -> Any:  # fmt: skip
    """Copy a list and find its k-th pair.

    Args:
        law: FENCHEL_YOUNG takes the number of true items as k.
        x: Scores, (n,) float32.
        y: Labels, (n,) float32.
        mask: (n,) bool, which items are real; 0 = all.
        n: Number of places.
        size: Length of v, s and w: n rounded up to a multiple of WIDTH.
        wanted: k; -1 = the number of positives.
        quota: Rank of the pair to find instead of the k-th; -1 = the k-th.
        above: Items with a label above this are positive.
        v: Receives the scores, -inf where masked.
        s: Receives -1 for the true items and 1 for the others.
        w: Overwritten.

    Returns:
        The state, k, the number of items, x_[k], x_[k+1], the mean and variance of the scores, and the normal quantile
        of k. The state is 0 if the list does not count, 1 if it does, 2 if it counts but has no k-th pair because k is
        its number of items, and -1 if a score is not finite or its square overflows.
    """
    valid, positives, low, high, mean, variance = copy_list(x, y, mask, n, size, above, v, s)
    rank = i32(min(wanted if wanted >= 0 else np.int64(positives), np.int64(valid)))
    state = i32(positives > 0 and 0 < rank < valid)
    if not (abs(mean) + variance < f32(1e37)):
        state = i32(-1)
    kept, cut, z = ZERO, ZERO, ZERO
    if state > 0:
        if positives > rank:
            keep_best(y, n, size, rank, positives, s, w)
        if law == FENCHEL_YOUNG:
            rank = i32(0)
            for i in range(0, size, WIDTH):
                rank += count(load(s, i) < ZERO)
        if quota >= 0:
            rank = i32(min(quota, np.int64(valid)))
        if rank == valid:  # every item is true because of tied labels, or the quota is not smaller than the list
            state = i32(2)
        else:
            z, density = quantile(f32(rank) / f32(valid))
            variance = max(variance, ZERO)
            deviation = f32(math.sqrt(variance))
            slope = deviation / (f32(valid) * density)
            kept, cut = kth_pair(v, size, valid, rank, low, high, mean + z * deviation, slope)
    return state, rank, valid, kept, cut, mean, variance, z
