"""The thresholds at which memberships sum to k, by Newton's method inside a bracket."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from recsys_topk.ops.backends.compiled.arithmetic import (
    EPS,
    HALF,
    INFINITY,
    ONE,
    TWO,
    ZERO,
    exp_negative,
    f32,
    i32,
    magnitude,
)
from recsys_topk.ops.backends.compiled.build import inlined
from recsys_topk.ops.backends.compiled.lanes import count, least, splat, total, where
from recsys_topk.ops.backends.compiled.memory import load
from recsys_topk.ops.backends.task import LOGISTIC, WIDTH


@inlined
def distance(x: Any, base: Any, b: Any) -> Any:
    """Return (x - base) - b. The sum base + b would be rounded."""
    return (x - base) - b


@inlined
def nearest(v: Any, size: Any, base: Any, b: Any, steep: Any) -> Any:
    """Return the smallest abs((x_i - base - b) / tau)."""
    found = splat(INFINITY)
    for i in range(0, size, WIDTH):
        away = magnitude(distance(load(v, i), base, b))
        found = where(away < found, away, found)
    return least(found) * steep


@inlined
def balanced_step(spare: Any, missing: Any, leaking: Any, near: Any, tau: Any) -> Any:
    """Return the step of b that solves spare = missing t - leaking / t, t = exp(step / tau).

    Args:
        spare: Number or weight of the items above b minus k.
        missing: Sum of 1 - p over the items above b, in units of exp(-near).
        leaking: Sum of p over the items below b, in the same units.
        near: Distance of the nearest item.
        tau: Temperature.
    """
    more = np.float64(spare) * math.exp(min(np.float64(near), 300.0))
    missing, leaking = max(np.float64(missing), 1e-37), max(np.float64(leaking), 1e-37)
    root = math.sqrt(more * more + 4.0 * missing * leaking)
    ratio = (more + root) / (2.0 * missing) if more >= 0.0 else 2.0 * leaking / (root - more)
    return f32(np.float64(tau) * math.log(ratio))


@inlined
def nearest_logit(v: Any, size: Any, base: Any, b: Any, gap: Any, steep: Any) -> Any:
    """Return the smallest abs((x_i - base - b) / tau), or 0 if it is below 40 and b is not between the k-th pair."""
    inner = min(b, gap - b) * steep
    if inner > ZERO:
        return inner
    return ZERO if inner > f32(-40.0) else nearest(v, size, base, b, steep)


@inlined
def threshold(law: Any, v: Any, q: Any, size: Any, facts: Any, tau: Any) -> Any:
    """Return b with sum_i w_i F((x_i - base - b) / tau) = k, base = x_[k+1], and the logit of the nearest item.

    F is the logistic or the Laplace distribution function. The bracket of b is that of
    `recsys_topk.ops.selection.weighted.balance`.

    Args:
        law: LOGISTIC or LAPLACE.
        v: Scores, -inf where masked.
        q: Weights w; 0 = 1 each.
        size: Length of v.
        facts: Those of `begin_list`.
        tau: Temperature.
    """
    base, gap, k = facts.cut, facts.kept - facts.cut, f32(facts.rank)
    top, rest = facts.at_kept, facts.at_cut
    if q != 0 and gap == ZERO:  # weights of the tied items among the first k and beyond
        top, rest = k - facts.over, facts.over + facts.at_kept - k
    spread = facts.variance + (f32(2.9) if law == LOGISTIC else TWO) * tau * tau
    guess = facts.mean + facts.z * f32(math.sqrt(spread)) - base
    low = HALF * gap - tau * f32(math.log(max(k / rest, ONE)))
    high = HALF * gap + tau * f32(math.log(max((f32(facts.amount) - k) / top, ONE)))
    low, high = low - f32(0.01) * tau, high + f32(0.01) * tau  # the root may be a bound, which is rounded
    b = min(max(guess, low), high)
    if gap > f32(20.0) * tau:  # otherwise the items that matter are within 40 tau
        b = HALF * gap
    if law == LOGISTIC:
        b = logistic_threshold(v, q, size, facts, b, low, high, tau)
    else:
        b = laplace_threshold(v, q, size, facts, b, tau)
    return b, nearest_logit(v, size, base, b, gap, ONE / tau)


@inlined
def spare_weight(q: Any, facts: Any, above: Any, sums: Any, b: Any) -> Any:
    """Return the number or weight of the items above b minus k, which is exactly 0 between the k-th pair."""
    if q == 0:
        return f32(np.float64(above) - facts.rank)
    return ZERO if ZERO < b < facts.kept - facts.cut else total(sums) - f32(facts.rank)


@inlined
def logistic_threshold(v: Any, q: Any, size: Any, facts: Any, b: Any, low: Any, high: Any, tau: Any) -> Any:
    """Return the b of `threshold` for the logistic law, starting from b inside low <= b <= high.

    Newton's method on the logarithm of the sum. A step that leaves the bracket is replaced by `balanced_step`. A step
    longer than half of the previous one is replaced by a bisection, so that the step or the bracket halves each time.
    The search ends after a step below 1e-4 tau, because each step squares the error.
    """
    steep, wanted, base, gap = ONE / tau, f32(facts.rank), facts.cut, facts.kept - facts.cut
    rest = f32(facts.amount) - wanted
    last = INFINITY
    for turn in range(100):
        near = nearest_logit(v, size, base, b, gap, steep)
        scale = f32(math.exp(-near))
        above = i32(0)
        missings, leakings, slopes, aboves = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(0, size, WIDTH):
            u = distance(load(v, i), base, b) * steep
            share = exp_negative(near - magnitude(u))
            inverse = ONE / (share * scale + ONE)
            small = share * inverse
            up = u > ZERO
            if q != 0:
                weight = load(q, i)
                small = small * weight
                aboves = aboves + where(up, weight, ZERO)
            else:
                above += count(up)
            missings = missings + where(up, small, ZERO)
            leakings = leakings + where(up, ZERO, small)
            slopes = slopes + small * inverse
        missing, leaking, slope = total(missings), total(leakings), total(slopes)
        spare, balance = spare_weight(q, facts, above, aboves, b), leaking - missing
        excess = spare + scale * balance
        if excess > ZERO or (spare == ZERO and balance > ZERO):  # the product may underflow
            low = b
        else:
            high = b
        if spare == ZERO and abs(scale * balance) < f32(1e-3) * wanted:
            step = tau * balance / slope
        elif wanted < rest:
            step = tau * (wanted + excess) * f32(math.log1p(excess / wanted)) / (scale * slope)
        else:
            step = -tau * (rest - excess) * f32(math.log1p(-excess / rest)) / (scale * slope)
        if not (low <= b + step <= high):
            step = balanced_step(spare, missing, leaking, near, tau)
            if not (low <= b + step <= high):
                step = HALF * (low + high) - b
        if turn > 3 and not (abs(step) <= HALF * last):
            step = HALF * (low + high) - b
        last = abs(step)
        b += step
        if last <= max(f32(1e-4) * tau, f32(4.0) * EPS * abs(b)):
            break
    return b


@inlined
def laplace_threshold(v: Any, q: Any, size: Any, facts: Any, b: Any, tau: Any) -> Any:
    """Return the b of `threshold` for the Laplace law, starting from b.

    With A the sum of w_i exp(-(x_i - b) / tau) over the items above b, C that of w_i exp(-(b - x_i) / tau) over the
    others and r the weight of the items above b minus k, the b that satisfies the equation while no item changes side
    is b + tau log t with A t^2 - 2 r t - C = 0. The step never overshoots. The search ends when no item changes side.
    """
    steep, previous, base, gap = ONE / tau, i32(-1), facts.cut, facts.kept - facts.cut
    for _ in range(100):
        near = nearest_logit(v, size, base, b, gap, steep)
        above = i32(0)
        missing, leaking, aboves = splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(0, size, WIDTH):
            u = distance(load(v, i), base, b) * steep
            share = exp_negative(near - magnitude(u))
            up = u > ZERO
            above += count(up)
            if q != 0:
                weight = load(q, i)
                share = share * weight
                aboves = aboves + where(up, weight, ZERO)
            missing = missing + where(up, share, ZERO)
            leaking = leaking + where(up, ZERO, share)
        if above == previous:
            break
        previous = above
        spare = spare_weight(q, facts, above, aboves, b)
        b += balanced_step(spare, HALF * total(missing), HALF * total(leaking), near, tau)
    return b


@inlined
def clip_threshold(v: Any, q: Any, size: Any, facts: Any, steep: Any) -> Any:
    """Return t with sum_i w_i clip((x_i - base) / tau - t, 0, 1) = k, base = x_[k+1], and the weight of items inside.

    If x_[k] and x_[k+1] differ by tau or more, all t between them are exact. Otherwise Newton's method inside the
    bracket [-1, gap] is, once no item becomes, or stops being, fractional. From the tenth step on, every other step is
    a bisection, so that the search ends.
    """
    wanted, base, gap = f32(facts.rank), facts.cut, (facts.kept - facts.cut) * steep
    low, high = -ONE, gap
    t, inside = HALF * gap - HALF, ZERO
    for turn in range(0 if gap >= ONE else 100):
        counted, weights, sums = i32(0), splat(ZERO), splat(ZERO)
        for i in range(0, size, WIDTH):
            z = (load(v, i) - base) * steep - t
            p = where(z < ZERO, ZERO, z)
            p = where(p > ONE, ONE, p)
            free = (z > ZERO) & (z < ONE)
            if q != 0:
                weight = load(q, i)
                sums = sums + p * weight
                weights = weights + where(free, weight, ZERO)
            else:
                sums = sums + p
                counted += count(free)
        inside = total(weights) if q != 0 else f32(counted)
        excess = total(sums) - wanted
        if abs(excess) <= f32(4.0) * EPS * wanted:
            break
        if excess > ZERO:
            low = t
        else:
            high = t
        middle = HALF * (low + high)
        step = t + excess / inside if inside > ZERO and (turn < 10 or turn % 2 == 0) else middle
        if not (low <= step <= high):
            step = middle
        if step == t:
            break
        t = step
    return t, inside
