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
        spare: Number of items above b minus k.
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
def threshold(
    law: Any, v: Any, size: Any, valid: Any, k: Any, base: Any, gap: Any, mean: Any, variance: Any, z: Any, tau: Any
) -> Any:
    """Return b with sum_i F((x_i - base - b) / tau) = k and the distance of the nearest item to it, in units of tau.

    F is the logistic or the Laplace distribution function.

    Args:
        law: LOGISTIC or LAPLACE.
        v: Scores, -inf where masked.
        size: Length of v.
        valid: Number of valid scores.
        k: 1 <= k < valid.
        base: x_[k+1].
        gap: x_[k] - x_[k+1].
        mean: Mean of the scores.
        variance: Variance of the scores.
        z: Normal quantile of k.
        tau: Temperature.
    """
    spread = variance + (f32(2.9) if law == LOGISTIC else TWO) * tau * tau
    guess = mean + z * f32(math.sqrt(spread)) - base
    # The bracket holds the root.
    low, high = -tau * f32(math.log(f32(k))), gap + tau * f32(math.log(f32(valid) - f32(k)))
    b = min(max(guess, low), high)
    if gap > f32(20.0) * tau:  # otherwise the items that matter are within 40 tau
        b = HALF * gap
    if law == LOGISTIC:
        return logistic_threshold(v, size, valid, k, base, b, low, high, tau)
    return laplace_threshold(v, size, k, base, b, tau)


@inlined
def logistic_threshold(v: Any, size: Any, valid: Any, k: Any, base: Any, b: Any, low: Any, high: Any, tau: Any) -> Any:
    """Return the result of `threshold` for the logistic law, starting from b inside low <= b <= high.

    Newton's method on the logarithm of the sum. A step that leaves the bracket is replaced by `balanced_step`. A step
    longer than half of the previous one is replaced by a bisection, so that the step or the bracket halves each time.
    The search ends after a step below 1e-4 tau, because each step squares the error.
    """
    steep, wanted = ONE / tau, f32(k)
    last = INFINITY
    for turn in range(100):
        near = nearest(v, size, base, b, steep)
        scale = f32(math.exp(-near))
        above = i32(0)
        missings, leakings, slopes = splat(ZERO), splat(ZERO), splat(ZERO)
        for i in range(0, size, WIDTH):
            u = distance(load(v, i), base, b) * steep
            share = exp_negative(near - magnitude(u))
            inverse = ONE / (share * scale + ONE)
            small = share * inverse
            up = u > ZERO
            above += count(up)
            missings = missings + where(up, small, ZERO)
            leakings = leakings + where(up, ZERO, small)
            slopes = slopes + small * inverse
        missing, leaking, slope = total(missings), total(leakings), total(slopes)
        spare, balance = above - k, leaking - missing
        excess = f32(spare) + scale * balance
        if excess > ZERO:
            low = b
        else:
            high = b
        if spare == 0 and abs(scale * balance) < f32(1e-3) * wanted:
            step = tau * balance / slope
        elif TWO * wanted < f32(valid):
            step = tau * (wanted + excess) * f32(math.log1p(excess / wanted)) / (scale * slope)
        else:
            rest = f32(valid) - wanted
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
    return b, nearest(v, size, base, b, steep)


@inlined
def laplace_threshold(v: Any, size: Any, k: Any, base: Any, b: Any, tau: Any) -> Any:
    """Return the result of `threshold` for the Laplace law, starting from b.

    Each step would be exact if no item changed side (see `recsys_topk.ops.selection.laplace.laplace_threshold`). It
    never overshoots. The search ends when no item changes side.
    """
    steep, previous = ONE / tau, i32(-1)
    for _ in range(100):
        near = nearest(v, size, base, b, steep)
        above = i32(0)
        missing, leaking = splat(ZERO), splat(ZERO)
        for i in range(0, size, WIDTH):
            u = distance(load(v, i), base, b) * steep
            share = exp_negative(near - magnitude(u))
            up = u > ZERO
            above += count(up)
            missing = missing + where(up, share, ZERO)
            leaking = leaking + where(up, ZERO, share)
        if above == previous:
            return b, near
        previous = above
        b += balanced_step(above - k, HALF * total(missing), HALF * total(leaking), near, tau)
    return b, nearest(v, size, base, b, steep)


@inlined
def clip_threshold(v: Any, size: Any, k: Any, base: Any, gap: Any, steep: Any) -> Any:
    """Return t with sum_i clip((x_i - base) / tau - t, 0, 1) = k, base = x_[k+1], and the number of fractional items.

    Newton's method inside the bracket [-1, gap], exact once no item becomes, or stops being, fractional. From the
    tenth step on, every other step is a bisection, so that the search ends.
    """
    wanted = f32(k)
    low, high = -ONE, gap
    t = HALF * gap - HALF
    inside = i32(0)
    for turn in range(100):
        inside, sums = i32(0), splat(ZERO)
        for i in range(0, size, WIDTH):
            z = (load(v, i) - base) * steep - t
            p = where(z < ZERO, ZERO, z)
            sums = sums + where(p > ONE, ONE, p)
            inside += count((z > ZERO) & (z < ONE))
        excess = total(sums) - wanted
        if abs(excess) <= f32(4.0) * EPS * wanted:
            break
        if excess > ZERO:
            low = t
        else:
            high = t
        middle = HALF * (low + high)
        step = t + excess / f32(inside) if inside > 0 and (turn < 10 or turn % 2 == 0) else middle
        if not (low <= step <= high):
            step = middle
        if step == t:
            break
        t = step
    return t, inside
