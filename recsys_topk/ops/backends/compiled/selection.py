"""A list of a batch, copied and padded, and its k-th pair of scores.

Each list is first copied into a buffer. Masked items become -inf, and the list is padded with -inf to a multiple of
`WIDTH`, so that later loops need no mask and have no remainder. Arrays are given by their address. The address of the
weights of the items is 0 if all weights are 1. It is a constant of a kernel, so that the compiler drops the other
branch.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import HALF, INFINITY, ONE, ZERO, f32, i32, number, ordered
from recsys_topk.ops.backends.compiled.build import compiled, inlined
from recsys_topk.ops.backends.compiled.lanes import bits_of, count, greatest, least, places, splat, total, where
from recsys_topk.ops.backends.compiled.memory import load, load_bits, load_where, read, store, write
from recsys_topk.ops.backends.task import FENCHEL_YOUNG, WIDTH

# Number of items whose weights are added in float32. Weights of 0.1 must not miss a sum of 1 by more than SLACK of it.
CHUNK = 8 * WIDTH
SLACK = 8.0 * 2.0**-23  # as in recsys_topk.numerics


class Facts(NamedTuple):
    """What the laws need of a list.

    Attributes:
        rank: k.
        amount: Number of items, or the sum of their weights.
        kept: x_[k].
        cut: x_[k+1].
        over: Weight of the items above x_[k]. This and the next two only for lists with weights.
        at_kept: Weight of the items equal to x_[k].
        at_cut: Weight of the items equal to x_[k+1].
        mean: Mean of the scores.
        variance: Variance of the scores.
        z: Normal quantile of k.
    """

    rank: Any
    amount: Any
    kept: Any
    cut: Any
    over: Any
    at_kept: Any
    at_cut: Any
    mean: Any
    variance: Any
    z: Any


@inlined
def copy_list(x: Any, y: Any, mask: Any, weights: Any, n: Any, size: Any, above: Any, v: Any, s: Any, q: Any) -> Any:
    """Copy a list: scores into v (-inf where masked), -1 for positives and 1 for others into s, weights into q.

    Returns:
        Number of valid items, number of positives, their weights, smallest and largest score, and the mean and
        variance.
    """
    low, high = splat(INFINITY), splat(-INFINITY)
    sums, squares, weighed, held = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    positives, valid, amount, share = i32(0), i32(0), 0.0, 0.0
    shift = read(x, 0, f32) if mask == 0 or read(mask, 0, np.uint8) else ZERO
    for i in range(0, size, WIDTH):
        real = places(i32(i)) < i32(n)
        if mask != 0:
            real = load_bits(mask, i, real)
        weight = splat(ONE)
        if q != 0:
            weight = load_where(weights, i, real)
            real = real & (weight > ZERO)
            weight = where(real, weight, ZERO)
            store(q, i, weight)
        value = load_where(x, i, real) + ZERO  # -0 becomes 0
        positive = (load_where(y, i, real) > above) & real
        low = where((value < low) & real, value, low)
        high = where((value > high) & real, value, high)
        moved = where(real, value - shift, ZERO)
        first = moved
        if q != 0:
            first = moved * weight
            weighed = weighed + weight
            held = held + where(positive, weight, ZERO)
            if (i + WIDTH) % CHUNK == 0:
                amount, share = amount + np.float64(total(weighed)), share + np.float64(total(held))
                weighed, held = splat(ZERO), splat(ZERO)
        sums = sums + first
        squares = squares + moved * first
        valid += count(real)
        positives += count(positive)
        store(v, i, where(real, value, -INFINITY))
        store(s, i, where(positive, -ONE, ONE))
    if q != 0:
        amount, share = amount + np.float64(total(weighed)), share + np.float64(total(held))
    else:
        amount, share = np.float64(valid), np.float64(positives)
    part = ONE / f32(amount) if amount > 0.0 else ONE
    mean = total(sums) * part
    return (
        valid,
        positives,
        amount,
        share,
        least(low),
        greatest(high),
        shift + mean,
        total(squares) * part - mean * mean,
    )


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
def weighted_pair(
    v: Any, q: Any, size: Any, valid: Any, amount: Any, k: Any, low: Any, high: Any, guess: Any, slope: Any
) -> Any:
    """Return the pair of `recsys_topk.ops.selection.weighted.weighted_pair`, 0 < k < amount.

    The bound moves as in `kth_pair`; to the next score if k is less than 1.5 items away. Each pass drops at least one
    score. The search ends if the weight above the bound is k, or if one score is left: it is both x_[k] and x_[k+1].

    Args:
        v: Scores, -inf where masked.
        q: Weights.
        size: Length of v and q.
        valid: Number of items.
        amount: Sum of the weights.
        k: The weight of the items up to the first score of the pair.
        low: Smallest score.
        high: Largest score.
        guess: The first bound.
        slope: How far to move the bound per weight above it in excess of k.
    """
    over, under, t, close = amount, 0.0, guess, 1.5 * amount / valid
    step = 0
    while low < high:
        if step >= 12 or not (low <= t < high):
            t = number(i32((np.int64(ordered(low)) + np.int64(ordered(high))) >> 1))
        reached, kept, cut = 0.0, splat(INFINITY), splat(-INFINITY)
        for start in range(0, size, CHUNK):
            sums = splat(ZERO)
            for i in range(start, min(start + CHUNK, size), WIDTH):
                value = load(v, i)
                up = value > t
                sums = sums + where(up, load(q, i), ZERO)
                kept = where(up & (value < kept), value, kept)
                cut = where(up, cut, where(value > cut, value, cut))
            reached += np.float64(total(sums))
        if abs(reached - k) <= SLACK * k:
            return least(kept), greatest(cut)
        if reached > k:
            low, over = least(kept), reached
        else:
            high, under = greatest(cut), reached
        if abs(reached - k) < close:
            t = low if reached > k else number(ordered(high) - i32(1))
        elif step < 2:
            t += f32(reached - k) * slope
        else:
            t = low + (high - low) * (HALF if step % 3 == 2 else f32((over - k) / (over - under)))
        step += 1
    return high, high


@inlined
def weights_at(v: Any, q: Any, size: Any, kept: Any, cut: Any) -> Any:
    """Return the weights of the items above `kept`, equal to it, and equal to `cut`."""
    over, at_kept, at_cut = splat(ZERO), splat(ZERO), splat(ZERO)
    for i in range(0, size, WIDTH):
        value, weight = load(v, i), load(q, i)
        over = over + where(value > kept, weight, ZERO)
        at_kept = at_kept + where(value == kept, weight, ZERO)
        at_cut = at_cut + where(value == cut, weight, ZERO)
    return total(over), total(at_kept), total(at_cut)


@inlined
def keep_best(y: Any, q: Any, n: Any, size: Any, k: Any, positives: Any, held: Any, s: Any, w: Any) -> None:
    """Keep in s only the k positives of a list with the largest labels, ties at the boundary included.

    Args:
        y: Labels, (n,).
        q: Weights; 0 = 1 each.
        n: Number of places.
        size: Length of s and w.
        k: Number or weight of the positives to keep, less than `held`.
        positives: Number of positives.
        held: Their number or weight.
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
    label, reached, enough = high, 0.0, k - (SLACK * k if q != 0 else 0.0)
    for step in range(6):
        below, sums, found = splat(-INFINITY), splat(ZERO), i32(0)
        for i in range(0, size, WIDTH):
            value = load(w, i)
            up = value >= label
            if q != 0:
                sums = sums + where(up, load(q, i), ZERO)
            else:
                found += count(up)
            below = where(up, below, where(value > below, value, below))
        reached = np.float64(total(sums)) if q != 0 else np.float64(found)
        if reached >= enough or (step == 1 and 4.0 * reached < k):
            break
        label = greatest(below)
    if reached < enough:
        spread = (high - low) / f32(held)
        guess = high - spread * f32(k)
        if q != 0:
            label, _ = weighted_pair(w, q, size, positives, held, k, low, high, guess, spread)
        else:
            label, _ = kth_pair(w, size, positives, i32(k), low, high, guess, spread)
    for i in range(0, size, WIDTH):
        store(s, i, where(load(w, i) >= label, load(s, i), ONE))


@compiled
def pair_lists(
    number: Any, begin: Any, end: Any, n: Any, x: Any, ks: Any, weights: Any, buffers: Any, size: Any, kept: Any,
    cut: Any, finite: Any,
) -> None:  # fmt: skip
    """Write the pairs of `weighted_pair` of lists begin <= b < end.

    Further arguments:
        ks: (B,) float64.
        kept: (B,), written: x_[k].
        cut: (B,), written: x_[k+1].
        finite: (parts,) uint8, written: whether all scores are finite. Otherwise the rest is not written.
    """
    v = buffers + number * 12 * size
    s, q = v + 4 * size, v + 8 * size
    write(finite, number, np.uint8(1))
    for b in range(begin, end):
        row, k = x + 4 * b * n, read(ks, b, np.float64)
        valid, _, amount, _, low, high, mean, variance = copy_list(
            row, row, 0, weights + 4 * b * n, n, size, ZERO, v, s, q
        )
        if not (abs(mean) + variance < f32(1e37)):
            write(finite, number, np.uint8(0))
            return
        z, density = quantile(f32(k / amount))
        deviation = f32(math.sqrt(max(variance, ZERO)))
        slope = deviation / (f32(amount) * density)
        first, second = weighted_pair(v, q, size, valid, amount, k, low, high, mean + z * deviation, slope)
        write(kept, b, first)
        write(cut, b, second)


@inlined
def begin_list(
    law: Any, x: Any, y: Any, mask: Any, weights: Any, n: Any, size: Any, wanted: Any, quota: Any, above: Any, v: Any,
    s: Any, w: Any, q: Any,
) -> Any:  # fmt: skip
    """Copy a list and find its k-th pair.

    Args:
        law: FENCHEL_YOUNG takes the number of true items as k.
        x: Scores, (n,) float32.
        y: Labels, (n,) float32.
        mask: (n,) bool, which items are real; 0 = all.
        weights: Weights of the items, (n,) float32; read if q is not 0.
        n: Number of places.
        size: Length of v, s, w and q: n rounded up to a multiple of WIDTH.
        wanted: k; -1 = the number of positives.
        quota: Rank of the pair to find instead of the k-th; -1 = the k-th.
        above: Items with a label above this are positive.
        v: Receives the scores, -inf where masked.
        s: Receives -1 for the true items and 1 for the others.
        w: Overwritten.
        q: Receives the weights, 0 where masked; 0 = the items have no weights.

    Returns:
        The state and the facts. The state is 0 if the list does not count, 1 if it does, 2 if it counts but has no k-th
        pair because k is its number of items, and -1 if a score is not finite or its square overflows.
    """
    valid, positives, amount, held, low, high, mean, variance = copy_list(x, y, mask, weights, n, size, above, v, s, q)
    rank = min(wanted if wanted >= 0.0 else held, amount)
    whole = amount * (1.0 - SLACK) if q != 0 else amount
    state = i32(positives > 0 and 0.0 < rank < whole)
    if not (abs(mean) + variance < f32(1e37)):
        state = i32(-1)
    kept, cut, z, over, at_kept, at_cut = ZERO, ZERO, ZERO, ZERO, ONE, ONE
    if state > 0:
        if held > rank:
            keep_best(y, q, n, size, rank, positives, held, s, w)
        if law == FENCHEL_YOUNG:
            trues, sums = i32(0), splat(ZERO)
            for i in range(0, size, WIDTH):
                true = load(s, i) < ZERO
                trues += count(true)
                if q != 0:
                    sums = sums + where(true, load(q, i), ZERO)
            rank = amount if trues == valid else np.float64(total(sums)) if q != 0 else np.float64(trues)
        if quota >= 0:
            rank = min(np.float64(quota), amount)
        if rank >= whole:  # every item is true because of tied labels, or the quota is not smaller than the list
            state = i32(2)
        else:
            z, density = quantile(f32(rank / amount))
            variance = max(variance, ZERO)
            deviation = f32(math.sqrt(variance))
            slope = deviation / (f32(amount) * density)
            guess = mean + z * deviation
            if q == 0:
                kept, cut = kth_pair(v, size, valid, i32(rank), low, high, guess, slope)
            else:
                kept, cut = weighted_pair(v, q, size, valid, amount, rank, low, high, guess, slope)
                over, at_kept, at_cut = weights_at(v, q, size, kept, cut)
    return state, Facts(rank, amount, kept, cut, over, at_kept, at_cut, mean, variance, z)
