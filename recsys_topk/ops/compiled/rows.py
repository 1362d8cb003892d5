"""One list at a time: thresholds, cross-entropies and their gradients, in loops that LLVM vectorises.

LLVM vectorises a loop without calls and early exits, and sums without conditions. So exp is a polynomial with a bit
cast, counts are int32 sums of comparisons, and minima are taken over the bits of a float, whose order as integers is
the order of the numbers.

Each list is first copied into a buffer, its masked items as -inf, padded with -inf to a multiple of `WIDTH`. No later
loop then needs the mask, or has a remainder. All helpers are in this file, because the cache of compiled code looks at
the file of a function and not at what the function calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.ir  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 32

f32, i32 = np.float32, np.int32
ZERO, HALF, ONE, TWO = f32(0.0), f32(0.5), f32(1.0), f32(2.0)
INFINITY = f32(np.inf)
LOWEST = f32(-80.0)  # exp of less is not a normal number
TINY = f32(1.1754944e-38)
EPS = f32(1.1920929e-07)
LOG_2 = f32(0.6931472)
SIGN, EXPONENT, BIAS = i32(31), i32(23), i32(127)
MAGNITUDE = i32(0x7FFFFFFF)
SMALLEST, LARGEST = i32(-0x80000000), i32(0x7FFFFFFF)
CHUNK = 4096  # items whose terms are summed in float32
PER_LOG = 32  # probabilities of 1e-6 or more whose product is a float64
CLAMP = 1e-6  # as in recsys_topk.losses.topk

DFTOPK, LOGISTIC, LAPLACE, CLIP, FENCHEL_YOUNG = 0, 1, 2, 3, 4  # the laws
PAIR_ONES, PAIR_DIFFERENCES, PAIR_ROWS = 0, 1, 2  # the weights of pairs

# The exponential on [-log(2) / 2, log(2) / 2]; log(2) is subtracted in two parts.
LOG2_E, LOG2_HIGH, LOG2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
E0, E1, E2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
E3, E4, E5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)

# log(1 + x) / x on [0, 1], with a relative error of 3e-8 (a weighted least-squares fit).
L1, L2, L3, L4 = f32(-0.49999493), f32(0.33319098), f32(-0.24842979), f32(0.19105993)
L5, L6, L7, L8 = f32(-0.13663214), f32(0.07822556), f32(-0.029504986), f32(0.0052326294)


def compiled(function: F) -> F:
    """Compile at the first call, without the GIL, and keep the result on disk. Sums may be reordered, NaN is kept."""
    flags = {"reassoc", "contract", "nsz", "arcp"}
    return cast(F, numba.njit(nogil=True, cache=True, fastmath=flags, error_model="numpy")(function))


def inlined(function: F) -> F:
    """Compile a small helper into its callers, without reordering what it computes: its roundings matter."""
    make = numba.njit(nogil=True, cache=True, fastmath={"contract"}, error_model="numpy", forceinline=True)
    return cast(F, make(function))


def _bit_cast(name: str, source: Any, target: Any, make: Callable[[], Any]) -> Any:
    def cast_bits(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], make())

        return target(source), generate

    cast_bits.__name__ = name
    return intrinsic(cast_bits)


as_float = _bit_cast("as_float", types.int32, types.float32, llvmlite.ir.FloatType)
as_bits = _bit_cast("as_bits", types.float32, types.int32, lambda: llvmlite.ir.IntType(32))


@inlined
def exp_negative(x: Any) -> Any:
    """Return exp(x) for x <= 0, to 2 units in the last place; exp(-80) for less."""
    x = LOWEST if x < LOWEST else x
    n = np.floor(x * LOG2_E + HALF)
    r = x - n * LOG2_HIGH - n * LOG2_LOW
    y = E0
    y = y * r + E1
    y = y * r + E2
    y = y * r + E3
    y = y * r + E4
    y = y * r + E5
    y = y * r * r + r + ONE
    return y * as_float((i32(n) + BIAS) << EXPONENT)


@inlined
def log1p_unit(x: Any) -> Any:
    """Return log(1 + x) for 0 <= x <= 1, to 2 units in the last place."""
    y = L8
    y = y * x + L7
    y = y * x + L6
    y = y * x + L5
    y = y * x + L4
    y = y * x + L3
    y = y * x + L2
    y = y * x + L1
    y = y * x + ONE
    return y * x


@inlined
def ordered(x: Any) -> Any:
    """Return an int32 whose order is that of the float32 numbers."""
    bits = as_bits(x)
    return bits ^ ((bits >> SIGN) & MAGNITUDE)


@inlined
def number(order: Any) -> Any:
    """Return the float32 number of an `ordered` int32."""
    return as_float(order ^ ((order >> SIGN) & MAGNITUDE))


@compiled
def copy_list(x: Any, y: Any, mask: Any, b: Any, above: Any, v: Any, s: Any, size: Any) -> Any:
    """Copy list b: scores into v (-inf where masked), -1 for positives and 1 for others into s.

    Returns:
        Number of valid items, number of positives, smallest and largest score as `ordered`, and the mean and variance.
    """
    n = x.shape[1]
    low, high, positives, valid = LARGEST, SMALLEST, i32(0), i32(n)
    total, squares = ZERO, ZERO
    shift = x[b, 0]
    if mask.shape[0] == 0:
        for i in range(n):
            value = x[b, i]
            positive = i32(y[b, i] > above)
            v[i] = value
            s[i] = f32(i32(1) - (positive << i32(1)))
            positives += positive
            order = ordered(value)
            low, high = min(low, order), max(high, order)
            value -= shift
            total += value
            squares += value * value
    else:
        shift = shift if mask[b, 0] else ZERO
        valid = i32(0)
        for i in range(n):
            real = mask[b, i]
            value = x[b, i] if real else -INFINITY
            chosen = (y[b, i] > above) & real
            v[i] = value
            s[i] = -ONE if chosen else ONE
            positives += i32(chosen)
            valid += i32(real)
            order = ordered(value)
            low = min(low, order if real else LARGEST)
            high = max(high, order)
            value = value - shift if real else ZERO
            total += value
            squares += value * value
    for i in range(n, size):
        v[i] = -INFINITY
        s[i] = ONE
    share = ONE / f32(max(valid, i32(1)))
    mean = total * share
    return valid, positives, low, high, shift + mean, squares * share - mean * mean


@compiled
def quantile(p: Any) -> Any:
    """Return (z, density at z) of the standard normal law with P(Z > z) = p, to three digits."""
    tail = min(p, ONE - p)
    t = f32(math.sqrt(-TWO * f32(math.log(max(tail, f32(1e-7))))))
    top = f32(2.515517) + t * (f32(0.802853) + t * f32(0.010328))
    z = t - top / (ONE + t * (f32(1.432788) + t * (f32(0.189269) + t * f32(0.001308))))
    density = f32(0.39894228) * f32(math.exp(-HALF * z * z))
    return (z if p < HALF else -z), density


@compiled
def kth_pair(v: Any, size: Any, valid: Any, k: Any, low: Any, high: Any, guess: Any, slope: Any) -> Any:
    """Return (x_[k], x_[k+1]), 1 <= k < valid, by counting the scores above a moving bound.

    The bound starts at a guess, takes two Newton steps, then interpolates. From the 12th count on it bisects the
    integers between its bounds, so there are at most 45 counts, whatever the scores; 3 to 5 for scores of a bell shape.

    Args:
        v: Scores, -inf where masked.
        size: Length of v.
        valid: Number of valid scores.
        k: Which.
        low: Smallest score, `ordered`.
        high: Largest score, `ordered`.
        guess: The first bound.
        slope: How far to move the bound for each score too many above it.
    """
    below, above = np.int64(low) - 1, np.int64(high)
    over, under = valid, i32(0)  # how many are above the two
    t = guess
    found = False
    for step in range(64):
        order = np.int64(ordered(t))
        if step >= 12 or not (below < order < above):
            order = (below + above) >> 1
            if order <= below:
                break
            t = number(i32(order))
        count = i32(0)
        for i in range(size):
            count += i32(v[i] > t)
        if count == k:
            found = True
            break
        if count > k:
            below, over = order, count
        else:
            above, under = order, count
        if step < 2:
            t += f32(count - k) * slope
        else:
            a, c = number(i32(max(below, np.int64(low)))), number(i32(above))
            t = a + (c - a) * (HALF if step % 3 == 2 else f32(over - k) / f32(over - under))
    if not found:  # no number lies between the bounds: both scores are the upper one
        value = number(i32(above))
        return value, value
    kept, cut = LARGEST, SMALLEST
    for i in range(size):
        order32 = ordered(v[i])
        up = v[i] > t
        kept = min(kept, order32 if up else LARGEST)
        cut = max(cut, SMALLEST if up else order32)
    return number(kept), number(cut)


@compiled
def keep_best(y: Any, b: Any, k: Any, positives: Any, s: Any, w: Any, size: Any) -> None:
    """Leave only the k of more positives of list b with the largest labels in s, ties at the boundary included.

    Args:
        y: Labels.
        b: The list.
        k: How many.
        positives: How many there are.
        s: -1 for the positives and 1 for the others, changed in place.
        w: (size,) float32, overwritten.
        size: Length of s and w.
    """
    n = y.shape[1]
    low, high = LARGEST, SMALLEST
    for i in range(n):
        value = y[b, i]
        order = ordered(value)
        chosen = s[i] < ZERO
        w[i] = value if chosen else -INFINITY
        low, high = min(low, order if chosen else LARGEST), max(high, order if chosen else SMALLEST)
    if low == high:  # all tie
        return
    # The k-th largest label: of grades one of the first few different ones; places need a search.
    label, reached = number(high), i32(0)
    for step in range(6):
        below = SMALLEST
        reached = i32(0)
        for i in range(n):
            enough = w[i] >= label
            reached += i32(enough)
            below = max(below, SMALLEST if enough else ordered(w[i]))
        if reached >= k or (step == 1 and i32(4) * reached < k):
            break
        label = number(below)
    if reached < k:
        for i in range(n, size):
            w[i] = -INFINITY
        spread = (number(high) - number(low)) / f32(positives)
        label, _ = kth_pair(w, size, positives, k, low, high, number(high) - spread * f32(k), spread)
    for i in range(n):
        s[i] = s[i] if y[b, i] >= label else ONE


@inlined
def distance(x: Any, base: Any, b: Any) -> Any:
    """Return (x - base) - b; base + b would be rounded to the spacing of numbers at x."""
    return (x - base) - b


@compiled
def nearest(v: Any, size: Any, base: Any, b: Any, steep: Any) -> Any:
    """Return the smallest abs((x_i - base - b) / tau)."""
    bits = LARGEST
    for i in range(size):
        bits = min(bits, as_bits(abs(distance(v[i], base, b))))
    return as_float(bits) * steep


@compiled
def balanced_step(spare: Any, missing: Any, leaking: Any, near: Any, tau: Any) -> Any:
    """Return the step of b that solves spare = missing t - leaking / t, t = exp(step / tau).

    Args:
        spare: Items above b less those wanted.
        missing: What the items above b lack, in units of exp(-near).
        leaking: What the items below b have, in the same units.
        near: Distance of the nearest item.
        tau: Temperature.
    """
    more = np.float64(spare) * math.exp(min(np.float64(near), 300.0))
    missing, leaking = max(np.float64(missing), 1e-37), max(np.float64(leaking), 1e-37)
    root = math.sqrt(more * more + 4.0 * missing * leaking)
    ratio = (more + root) / (2.0 * missing) if more >= 0.0 else 2.0 * leaking / (root - more)
    return f32(np.float64(tau) * math.log(ratio))


@compiled
def logistic_threshold(v: Any, size: Any, valid: Any, k: Any, base: Any, gap: Any, guess: Any, tau: Any) -> Any:
    """Return b with sum_i sigmoid((x_i - base - b) / tau) = k, base = x_[k+1], and the nearest distance to it.

    Newton's method on the logarithm of the sum inside -tau log k <= b <= gap + tau log(n - k), which holds the root. A
    step that leaves the bracket is replaced by the exponential one (see `balanced_step`), and a step that is not half
    of the one before it by a bisection, so the steps or the bracket halve each time. It ends after a step below
    1e-4 tau: the error squares.
    """
    steep, wanted = ONE / tau, f32(k)
    low, high = -tau * f32(math.log(wanted)), gap + tau * f32(math.log(f32(valid) - wanted))
    b = min(max(guess, low), high)
    if gap > f32(20.0) * tau:  # else no item that matters is more than 40 tau away
        b = HALF * gap
    last = INFINITY
    for turn in range(100):
        near = nearest(v, size, base, b, steep)
        scale = f32(math.exp(-near))
        above, missing, leaking, slope = i32(0), ZERO, ZERO, ZERO
        for i in range(size):
            u = distance(v[i], base, b) * steep
            share = exp_negative(near - abs(u))
            inverse = ONE / (ONE + share * scale)
            small = share * inverse
            up = i32(u > ZERO)
            above += up
            missing += small * f32(up)
            leaking += small * f32(i32(1) - up)
            slope += small * inverse
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


@compiled
def laplace_threshold(v: Any, size: Any, valid: Any, k: Any, base: Any, gap: Any, guess: Any, tau: Any) -> Any:
    """Return b with sum_i F((x_i - base - b) / tau) = k, F the Laplace distribution function, and the nearest distance.

    The step that would be exact if no item changed side (see `recsys_topk.ops.laplace.laplace_threshold`): it never
    overshoots, and ends when no item changes side.
    """
    steep = ONE / tau
    low, high = -tau * f32(math.log(f32(k))), gap + tau * f32(math.log(f32(valid) - f32(k)))
    b, previous = min(max(guess, low), high), i32(-1)
    if gap > f32(20.0) * tau:  # else no item that matters is more than 40 tau away
        b = HALF * gap
    for _ in range(100):
        near = nearest(v, size, base, b, steep)
        above, missing, leaking = i32(0), ZERO, ZERO
        for i in range(size):
            u = distance(v[i], base, b) * steep
            share = exp_negative(near - abs(u))
            up = i32(u > ZERO)
            above += up
            missing += share * f32(up)
            leaking += share * f32(i32(1) - up)
        if above == previous:
            return b, near
        previous = above
        b += balanced_step(above - k, HALF * missing, HALF * leaking, near, tau)
    return b, nearest(v, size, base, b, steep)


@compiled
def clip_threshold(v: Any, size: Any, k: Any, base: Any, gap: Any, steep: Any) -> Any:
    """Return t with sum_i clip((x_i - base) / tau - t, 0, 1) = k, base = x_[k+1], and the number of fractional items.

    Newton's method inside the bracket [-1, gap], exact once no item becomes, or stops being, fractional. From the
    tenth step on every other step is a bisection, so it ends.
    """
    wanted = f32(k)
    low, high = -ONE, gap
    t = HALF * gap - HALF
    inside = i32(0)
    for turn in range(100):
        inside, total = i32(0), ZERO
        for i in range(size):
            z = (v[i] - base) * steep - t
            p = ZERO if z < ZERO else z
            p = ONE if p > ONE else p
            total += p
            inside += i32((z > ZERO) & (z < ONE))
        excess = total - wanted
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


@compiled
def clamped_logs(p: Any, size: Any) -> Any:
    """Return sum_i log(p_i) of probabilities of 1e-6 or more."""
    value = 0.0
    for start in range(0, size, PER_LOG):
        product = 1.0
        for i in range(start, start + PER_LOG):
            product *= np.float64(p[i])
        value += math.log(product)
    return value


@compiled
def begin_list(
    law: Any, x: Any, y: Any, mask: Any, ks: Any, k: Any, quota: Any, above: Any, b: Any, v: Any, s: Any, w: Any,
    size: Any, normal: Any,
) -> Any:  # fmt: skip
    """Copy list b and find its k-th pair.

    Args:
        law: FENCHEL_YOUNG takes the number of true items as k.
        x: Scores; y, mask, ks, k and above as in `dftopk_lists`.
        y: Labels.
        mask: Which items are real.
        ks: One k for each list.
        k: One for all.
        quota: Which pair to find instead of the k-th; -1 = the k-th.
        above: Items with a label above this are positive.
        b: The list.
        v: Receives the scores, -inf where masked.
        s: Receives -1 for the true items and 1 for the others.
        w: Overwritten.
        size: Length of v, s and w.
        normal: (4,) float32, k, number of items, quantile and density of the last call, which is often the next.

    Returns:
        0 for a list that does not count, 1 for one that does, 2 for one that does but has nothing to tell apart, and -1
        for one with a score, or a squared score, that is not finite; then k, the number of items, x_[k], x_[k+1], mean
        and variance.
    """
    valid, positives, low, high, mean, variance = copy_list(x, y, mask, b, above, v, s, size)
    wanted = ks[b] if ks.shape[0] else (k if k >= 0 else np.int64(positives))
    rank = i32(min(wanted, np.int64(valid)))
    state = i32(positives > 0 and 0 < rank < valid)
    if not (abs(mean) + variance < f32(1e37)):
        state = i32(-1)
    kept, cut = ZERO, ZERO
    if state > 0:
        if positives > rank:
            keep_best(y, b, rank, positives, s, w, size)
        if law == FENCHEL_YOUNG:
            rank = i32(0)
            for i in range(size):
                rank += i32(s[i] < ZERO)
        if quota >= 0:
            rank = i32(min(quota, np.int64(valid)))
        if rank == valid:  # tied labels make every item true, or the quota lets every item through
            state = i32(2)
        else:
            if f32(rank) != normal[0] or f32(valid) != normal[1]:
                normal[2], normal[3] = quantile(f32(rank) / f32(valid))
                normal[0], normal[1] = f32(rank), f32(valid)
            variance = max(variance, ZERO)
            deviation = f32(math.sqrt(variance))
            slope = deviation / (f32(valid) * normal[3])
            kept, cut = kth_pair(v, size, valid, rank, low, high, mean + normal[2] * deviation, slope)
    return state, rank, valid, kept, cut, mean, variance


@compiled
def no_loss(b: Any, state: Any, wants: Any, losses: Any, counted: Any, gradient: Any) -> None:
    """Write the results of a list without a loss."""
    counted[b] = state > 0
    losses[b] = ZERO
    if wants:
        for i in range(gradient.shape[1]):
            gradient[b, i] = ZERO


@compiled
def dftopk_lists(
    first: Any, last: Any, law: Any, x: Any, y: Any, mask: Any, ks: Any, k: Any, above: Any, tau: Any, alpha: Any,
    scale: Any, wants: Any, buffers: Any, losses: Any, counted: Any, gradient: Any,
) -> Any:  # fmt: skip
    """Write the DFTopK cross-entropy of each list, whether it counts, and its gradient times `scale`.

    With u = (x - b) / tau and t = s u, s = -1 for the true items and 1 for the others, the loss of an item is
    softplus(t) and its derivative s m / tau, m in [0, 1]: nothing cancels. The items at x_[k] and x_[k+1] receive
    -alpha and -(1 - alpha) of the sum of the derivatives, shared evenly among ties.

    Args:
        first: First list.
        last: One past the last list.
        law: DFTOPK.
        x: Scores, (B, N) float32.
        y: Labels, (B, N) float32.
        mask: (B, N) bool, or (0, 0): all items are real.
        ks: One k for each list, (B,) int64, or (0,): `k` is the k of all.
        k: One for all; -1 = each list's number of positives.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Where the threshold lies between x_[k+1] and x_[k].
        scale: What gradients are multiplied by.
        wants: Whether to write gradients.
        buffers: (3, N rounded up to a multiple of WIDTH) float32, overwritten.
        losses: (B,) float32, written; 0 for lists that do not count.
        counted: (B,) bool, written.
        gradient: (B, N) float32, written.

    Returns:
        The number of lists that count and the sum of the losses; -1 and 0 if a score is not finite, or its square.
    """
    v, s, w = buffers[0], buffers[1], buffers[2]
    n, size, steep = x.shape[1], buffers.shape[1], ONE / tau
    number_counted, whole = 0, 0.0
    normal = np.zeros(4, f32)
    for b in range(first, last):
        state, _, valid, kept, cut, _, _ = begin_list(law, x, y, mask, ks, k, -1, above, b, v, s, w, size, normal)
        if state < 0:
            return -1, 0.0
        if state != 1:
            no_loss(b, state, wants, losses, counted, gradient)
            number_counted += state > 0
            continue
        base = cut + alpha * (kept - cut)
        value, pull, kepts, cuts = 0.0, 0.0, i32(0), i32(0)
        for start in range(0, size, CHUNK):
            part, signs = v[start : start + CHUNK], s[start : start + CHUNK]
            terms, slopes = ZERO, ZERO
            for i in range(len(part)):
                t = (part[i] - base) * steep * signs[i]
                e = exp_negative(-abs(t))
                m = signs[i] * (ONE if t >= ZERO else e) / (ONE + e)
                signs[i] = m
                slopes += m
                terms += (t if t > ZERO else ZERO) + log1p_unit(e)
                kepts += i32(part[i] == kept)
                cuts += i32(part[i] == cut)
            value += terms
            pull += slopes
        value /= valid
        if wants:
            rate = scale * steep / f32(valid)
            at_kept = -alpha * f32(pull) / f32(kepts)
            at_cut = (alpha - ONE) * f32(pull) / f32(cuts)
            for i in range(n):
                at = v[i]
                moved = s[i] + (at_kept if at == kept else ZERO) + (at_cut if at == cut else ZERO)
                gradient[b, i] = moved * rate if at > -INFINITY else ZERO
        counted[b] = True
        losses[b] = value
        whole += value
        number_counted += 1
    return number_counted, whole


@compiled
def threshold_lists(
    first: Any, last: Any, law: Any, x: Any, y: Any, mask: Any, ks: Any, k: Any, above: Any, tau: Any, alpha: Any,
    scale: Any, wants: Any, buffers: Any, losses: Any, counted: Any, gradient: Any,
) -> Any:  # fmt: skip
    """Do what `dftopk_lists` does for the LOGISTIC and LAPLACE laws, whose memberships sum to k.

    The loss of an item is softplus(t), or -log F(-t) for the Laplace law. The threshold b moves with an item by its
    share of the density, w_i / sum_j w_j. Distances are taken from that of the nearest item, so that the shares exist
    however far all items are.
    """
    v, s, w = buffers[0], buffers[1], buffers[2]
    n, size, steep = x.shape[1], buffers.shape[1], ONE / tau
    number_counted, whole = 0, 0.0
    normal = np.zeros(4, f32)
    for b in range(first, last):
        state, rank, valid, kept, cut, mean, variance = begin_list(
            law, x, y, mask, ks, k, -1, above, b, v, s, w, size, normal
        )
        if state < 0:
            return -1, 0.0
        if state != 1:
            no_loss(b, state, wants, losses, counted, gradient)
            number_counted += state > 0
            continue
        value, pull, weight = 0.0, 0.0, 0.0
        spread = variance + (f32(2.9) if law == LOGISTIC else TWO) * tau * tau
        guess = mean + normal[2] * f32(math.sqrt(spread)) - cut
        if law == LOGISTIC:
            threshold, near = logistic_threshold(v, size, valid, rank, cut, kept - cut, guess, tau)
        else:
            threshold, near = laplace_threshold(v, size, valid, rank, cut, kept - cut, guess, tau)
        unit = f32(math.exp(-near))
        for start in range(0, size, CHUNK):
            part, signs, shares = v[start : start + CHUNK], s[start : start + CHUNK], w[start : start + CHUNK]
            terms, slopes, density = ZERO, ZERO, ZERO
            if law == LOGISTIC:
                for i in range(len(part)):
                    u = distance(part[i], cut, threshold) * steep
                    t = u * signs[i]
                    share = exp_negative(near - abs(u))
                    e = share * unit
                    inverse = ONE / (ONE + e)
                    m = signs[i] * (ONE if t >= ZERO else e) * inverse
                    share *= inverse * inverse
                    terms += (t if t > ZERO else ZERO) + log1p_unit(e)
                    slopes += m
                    density += share
                    signs[i], shares[i] = m, share
            else:
                for i in range(len(part)):
                    u = distance(part[i], cut, threshold) * steep
                    t = u * signs[i]
                    share = exp_negative(near - abs(u))
                    e = share * unit
                    m = ONE if t >= ZERO else e / (TWO - e)
                    terms += (t if t > ZERO else ZERO) + log1p_unit(m)
                    m *= signs[i]
                    slopes += m
                    density += share
                    signs[i], shares[i] = m, share
            value += terms
            pull += slopes
            weight += density
        value /= valid
        if wants:
            rate, part = scale * steep / f32(valid), f32(pull / weight)
            for i in range(n):
                gradient[b, i] = (s[i] - w[i] * part) * rate if v[i] > -INFINITY else ZERO
        counted[b] = True
        losses[b] = value
        whole += value
        number_counted += 1
    return number_counted, whole


@compiled
def clip_lists(
    first: Any, last: Any, law: Any, x: Any, y: Any, mask: Any, ks: Any, k: Any, above: Any, tau: Any, alpha: Any,
    scale: Any, wants: Any, buffers: Any, losses: Any, counted: Any, gradient: Any,
) -> Any:  # fmt: skip
    """Do what `dftopk_lists` does for the CLIP and FENCHEL_YOUNG laws: p = clip((x - b) / tau, 0, 1), summing to k.

    Under CLIP the loss is the cross-entropy of p clamped to [1e-6, 1 - 1e-6], with no gradient outside.
    """
    v, s, w = buffers[0], buffers[1], buffers[2]
    n, size, steep = x.shape[1], buffers.shape[1], ONE / tau
    least, most = f32(CLAMP), f32(1.0 - CLAMP)
    number_counted, whole = 0, 0.0
    normal = np.zeros(4, f32)
    for b in range(first, last):
        state, rank, valid, kept, cut, _, _ = begin_list(law, x, y, mask, ks, k, -1, above, b, v, s, w, size, normal)
        if state < 0:
            return -1, 0.0
        if state != 1:
            no_loss(b, state, wants, losses, counted, gradient)
            number_counted += state > 0
            continue
        threshold, inside = clip_threshold(v, size, rank, cut, (kept - cut) * steep, steep)
        if law == FENCHEL_YOUNG:
            hinges = ZERO
            rate = scale / f32(valid)
            for i in range(size):
                z = (v[i] - cut) * steep - threshold
                true = s[i] < ZERO
                wrong = ONE - z if true else z
                wrong = ZERO if wrong < ZERO else wrong
                hinges += wrong - HALF if wrong >= ONE else HALF * wrong * wrong
                p = ZERO if z < ZERO else z
                p = ONE if p > ONE else p
                w[i] = (p - (ONE if true else ZERO)) * rate
            if wants:
                gradient[b, :] = w[:n]
            value = np.float64(hinges * tau) / valid
        else:
            pull = ZERO
            for i in range(size):
                z = (v[i] - cut) * steep - threshold
                fractional = (z > ZERO) & (z < ONE)
                p = ZERO if z < ZERO else z
                p = ONE if p > ONE else p
                chosen = p if s[i] < ZERO else ONE - p
                clamped = least if chosen < least else chosen
                clamped = most if clamped > most else clamped
                m = s[i] / clamped if (chosen == clamped) & fractional else ZERO
                pull += m
                s[i] = m
                w[i] = clamped if v[i] > -INFINITY else ONE
                v[i] = ONE if fractional else ZERO
            if wants:
                rate, average = scale * steep / f32(valid), pull / f32(max(inside, i32(1)))
                for i in range(n):
                    gradient[b, i] = (s[i] - v[i] * average) * rate
            value = -clamped_logs(w, size) / valid
        counted[b] = True
        losses[b] = value
        whole += value
        number_counted += 1
    return number_counted, whole


@inlined
def log_positive(x: Any) -> Any:
    """Return log(x) of a normal number x > 0."""
    bits = as_bits(x)
    mantissa = as_float((bits & i32(0x7FFFFF)) | i32(0x3F800000))
    return f32((bits >> EXPONENT) - BIAS) * LOG_2 + log1p_unit(mantissa - ONE)


@compiled
def stage_term(
    law: Any, v: Any, s: Any, u: Any, d: Any, w: Any, rank: Any, valid: Any, kept: Any, cut: Any, mean: Any,
    variance: Any, z: Any, tau: Any, alpha: Any,
) -> Any:  # fmt: skip
    """Return the summed losses of all items and of the true items in one stage of one list.

    Args:
        law: DFTOPK, LOGISTIC or LAPLACE.
        v: Scores, -inf where masked.
        s: -1 for the true items and 1 for the others.
        u: Receives (x - b) / tau.
        d: Receives the derivatives of the item losses with respect to u.
        w: Receives how far the threshold moves with each item.
        rank: k.
        valid: Number of items.
        kept: x_[k].
        cut: x_[k+1].
        mean: Of the scores.
        variance: Of the scores.
        z: Normal quantile of k.
        tau: Temperature.
        alpha: Of the dftopk law.
    """
    size, steep = len(v), ONE / tau
    base, b, near = cut, ZERO, ZERO
    if law == DFTOPK:
        base = cut + alpha * (kept - cut)
    else:
        spread = variance + (f32(2.9) if law == LOGISTIC else TWO) * tau * tau
        guess = mean + z * f32(math.sqrt(spread)) - cut
        if law == LOGISTIC:
            b, near = logistic_threshold(v, size, valid, rank, cut, kept - cut, guess, tau)
        else:
            b, near = laplace_threshold(v, size, valid, rank, cut, kept - cut, guess, tau)
    unit = f32(math.exp(-near))
    terms, own, weight = ZERO, ZERO, ZERO
    for i in range(size):
        u[i] = distance(v[i], base, b) * steep
    if law == DFTOPK:
        kepts, cuts = i32(0), i32(0)
        for i in range(size):
            t = u[i] * s[i]
            e = exp_negative(-abs(t))
            loss = (t if t > ZERO else ZERO) + log1p_unit(e)
            terms += loss
            own += loss * (HALF - HALF * s[i])
            d[i] = s[i] * (ONE if t >= ZERO else e) / (ONE + e)
        for i in range(size):
            kepts += i32(v[i] == kept)
            cuts += i32(v[i] == cut)
        at_kept, at_cut = alpha / f32(kepts), (ONE - alpha) / f32(cuts)
        for i in range(size):
            w[i] = (at_kept if v[i] == kept else ZERO) + (at_cut if v[i] == cut else ZERO)
        return terms, own
    if law == LOGISTIC:
        for i in range(size):
            t = u[i] * s[i]
            share = exp_negative(near - abs(t))
            e = share * unit
            inverse = ONE / (ONE + e)
            loss = (t if t > ZERO else ZERO) + log1p_unit(e)
            terms += loss
            own += loss * (HALF - HALF * s[i])
            share *= inverse * inverse
            weight += share
            d[i] = s[i] * (ONE if t >= ZERO else e) * inverse
            w[i] = share
    else:
        for i in range(size):
            t = u[i] * s[i]
            share = exp_negative(near - abs(t))
            e = share * unit
            m = ONE if t >= ZERO else e / (TWO - e)
            loss = (t if t > ZERO else ZERO) + log1p_unit(m)
            terms += loss
            own += loss * (HALF - HALF * s[i])
            weight += share
            d[i] = m * s[i]
            w[i] = share
    per = ONE / weight
    for i in range(size):
        w[i] *= per
    return terms, own


@compiled
def write_gradient(v: Any, d: Any, w: Any, rate: Any, out: Any) -> None:
    """Write the derivative with respect to the scores: d_i less what the threshold moves; 0 where masked."""
    pull = ZERO
    for i in range(len(d)):
        pull += d[i]
    for i in range(len(out)):
        out[i] = (d[i] - w[i] * pull) * rate if v[i] > -INFINITY else ZERO


@compiled
def survive(law: Any, u: Any, low: Any, unit: Any, p: Any, q: Any) -> None:
    """Add a stage to the survival: q becomes q + q_m p and p becomes p p_m, q in units of exp(-low).

    Args:
        law: DFTOPK, LOGISTIC or LAPLACE.
        u: (x - b) / tau of the stage; receives exp(low - abs(u)) with the sign of u, for `survival_slopes`.
        low: The smallest u of all stages, at least 0, which keeps the digits of probabilities near 1.
        unit: exp(-low).
        p: Probability of having survived the stages so far.
        q: One minus that, divided by `unit`.
    """
    if law == LAPLACE:
        for i in range(len(u)):
            near = exp_negative(low[i] - abs(u[i]))
            share = HALF * near
            rest = ONE - share * unit[i]
            up = u[i] > ZERO
            u[i] = near if up else -near
            q[i] += (share if up else rest) * p[i]
            p[i] *= rest if up else share
    else:
        for i in range(len(u)):
            share = exp_negative(low[i] - abs(u[i]))
            inverse = ONE / (ONE + share * unit[i])
            up = u[i] > ZERO
            u[i] = share if up else -share
            share *= inverse
            q[i] += (share if up else inverse) * p[i]
            p[i] *= inverse if up else share


@compiled
def survival_slopes(law: Any, u: Any, unit: Any, odds: Any, s: Any, d: Any) -> None:
    """Replace the derivatives d of the items that are not true by those of -log q: p / q d log p_m / du.

    `u` is what `survive` left in it.
    """
    if law == LAPLACE:
        for i in range(len(u)):
            share = abs(u[i])
            rise = share / (TWO - share * unit[i]) if u[i] > ZERO else ONE
            d[i] = d[i] if s[i] < ZERO else odds[i] * rise
    else:
        for i in range(len(u)):
            share = abs(u[i])
            rise = (share if u[i] > ZERO else ONE) / (ONE + share * unit[i])
            d[i] = d[i] if s[i] < ZERO else odds[i] * rise


@compiled
def joint_lists(
    first: Any, last: Any, law: Any, x: Any, y: Any, mask: Any, k: Any, quotas: Any, above: Any, tau: Any, alpha: Any,
    scale: Any, wants: Any, buffers: Any, losses: Any, counted: Any, own_gradient: Any, joint_gradient: Any,
) -> Any:  # fmt: skip
    """Write the terms of the joint objective and their gradients for lists first <= b < last.

    For an item that is true, the loss of surviving all stages is the sum of its losses in the stages. For another one
    it is -log q, q = 1 - prod_m p_m, with the derivative prod_m p_m / q d log p_m / du_m.

    Args:
        first: First list.
        last: One past the last list.
        law: DFTOPK, LOGISTIC or LAPLACE.
        x: Scores of the M stages, (M, B, N) float32.
        y: Labels, (B, N) float32.
        mask: (B, N) bool, or (0, 0): all items are real.
        k: Number of items wanted; -1 = each list's number of positives.
        quotas: (M,) int64, where each stage cuts; -1 = at k.
        above: Items with a label above this are positive.
        tau: Temperature.
        alpha: Of the dftopk law.
        scale: What gradients are multiplied by.
        wants: Whether to write gradients.
        buffers: (4 M + 5, N rounded up to a multiple of WIDTH) float32, overwritten.
        losses: (M + 1, B) float32, written: the losses of the stages and of the survival.
        counted: (M + 1, B) bool, written: where they count.
        own_gradient: (M, B, N) float32, written: of the losses of the stages.
        joint_gradient: (M, B, N) float32, written: of the loss of survival.

    Returns:
        0, or -1 if a score, or its square, is not finite.
    """
    stages, size = x.shape[0], buffers.shape[1]
    s, low, unit, p, q = buffers[0], buffers[1], buffers[2], buffers[3], buffers[4]
    none = np.zeros(0, np.int64)
    normal = np.zeros(4, f32)
    rate = scale / tau
    for b in range(first, last):
        low[:] = INFINITY
        p[:] = ONE
        q[:] = ZERO
        share, joint = ZERO, ZERO
        for m in range(stages):
            v, u, d, w = buffers[5 + 4 * m], buffers[6 + 4 * m], buffers[7 + 4 * m], buffers[8 + 4 * m]
            state, rank, valid, kept, cut, mean, variance = begin_list(
                law, x[m], y, mask, none, k, quotas[m], above, b, v, s, w, size, normal
            )
            if state < 0:
                return -1
            counted[m, b] = state == 1
            losses[m, b] = ZERO
            if state == 1:
                share = ONE / f32(valid)
                terms, own = stage_term(
                    law, v, s, u, d, w, rank, valid, kept, cut, mean, variance, normal[2], tau, alpha
                )
                losses[m, b] = terms * share
                joint += own
                for i in range(size):
                    low[i] = u[i] if u[i] < low[i] else low[i]
        if share > ZERO:
            for i in range(size):
                low[i] = low[i] if low[i] > ZERO else ZERO
                unit[i] = exp_negative(-low[i])
            for m in range(stages):
                if counted[m, b]:
                    survive(law, buffers[6 + 4 * m], low, unit, p, q)
            for i in range(size):
                odds = p[i] / q[i]
                others = low[i] - log_positive(q[i]) if low[i] > ZERO else log1p_unit(odds)
                joint += others * (HALF + HALF * s[i])
                p[i] = odds
        losses[stages, b] = joint * share
        counted[stages, b] = share > ZERO
        if wants:
            for m in range(stages):
                v, u, d, w = buffers[5 + 4 * m], buffers[6 + 4 * m], buffers[7 + 4 * m], buffers[8 + 4 * m]
                if counted[m, b]:
                    write_gradient(v, d, w, rate * share, own_gradient[m, b])
                    survival_slopes(law, u, unit, p, s, d)
                    write_gradient(v, d, w, rate * share, joint_gradient[m, b])
                else:
                    own_gradient[m, b, :] = ZERO
                    joint_gradient[m, b, :] = ZERO
    return 0


@compiled
def pair_weights(
    i: Any, kind: Any, first: Any, second: Any, discounts: Any, ranks: Any, swap: Any, mu: Any, k: Any, near: Any,
    deep: Any, part: Any, w: Any,
) -> None:  # fmt: skip
    """Write the weights of the pairs (i, j) of one list, all j, to w. See `recsys_topk.ops.pair_sums.PairWeights`."""
    own = first[i]
    if kind == PAIR_ONES:
        for j in range(len(w)):
            w[j] = ONE if own > second[j] else ZERO
    elif kind == PAIR_ROWS:
        for j in range(len(w)):
            w[j] = own if second[j] < INFINITY else ZERO
    else:
        for j in range(len(w)):
            gap = own - second[j]
            w[j] = gap if gap > ZERO else ZERO
    if mu > ZERO:
        rank = ranks[i]
        for j in range(len(w)):
            part[j] = mu * near[np.uint32(TWO * abs(rank - ranks[j]))]
        if k < INFINITY:
            for j in range(len(w)):
                worse = rank if rank > ranks[j] else ranks[j]
                factor = deep[np.uint32(TWO * worse)]
                part[j] *= factor if worse > k else ONE
    elif swap:
        part[:] = ZERO
    if swap:
        d = discounts[i]
        for j in range(len(w)):
            w[j] *= part[j] + abs(d - discounts[j])
    elif mu > ZERO:
        for j in range(len(w)):
            w[j] *= part[j]


@compiled
def pair_lists(
    begin: Any, end: Any, kind: Any, x: Any, first: Any, second: Any, discounts: Any, ranks: Any, mu: Any, ks: Any,
    near: Any, deep: Any, sigma: Any, wants: Any, buffers: Any, losses: Any, gradient: Any,
) -> Any:  # fmt: skip
    """Write sum_ij w_ij log(1 + exp(-sigma (x_i - x_j))) and its gradient for lists begin <= b < end.

    Args:
        begin: First list.
        end: One past the last list.
        kind: PAIR_ONES, PAIR_DIFFERENCES or PAIR_ROWS.
        x: Scores, (B, N) float32.
        first: Values of the items i, (B, N) float32; -inf (PAIR_ROWS: 0) where an item is in no pair as the first.
        second: Values of the items j, (B, N) float32; inf where masked.
        discounts: (B, N) float32, or (0, 0): none.
        ranks: (B, N) float32, multiples of 1/2, or (0, 0): none.
        mu: Weight of the part from ranks; 0 without ranks.
        ks: Where that part is cut, (B,) float32.
        near: That part by twice the distance of two ranks.
        deep: What it is multiplied by beyond the cut, by twice the rank.
        sigma: Steepness.
        wants: Whether to write gradients.
        buffers: (7, N rounded up to a multiple of WIDTH) float32, overwritten.
        losses: (B,) float32, written.
        gradient: (B, N) float32, written.

    Returns:
        0, or -1 if a score is not finite.
    """
    v, w, g, other, d, r, part = (
        buffers[0], buffers[1], buffers[2], buffers[3], buffers[4], buffers[5], buffers[6]
    )  # fmt: skip
    n = x.shape[1]
    swap, ranked = discounts.shape[0] > 0, ranks.shape[0] > 0
    buffers[:] = ZERO
    other[:] = INFINITY
    for b in range(begin, end):
        total = ZERO
        for j in range(n):
            v[j] = x[b, j]
            total += abs(x[b, j])
        if not total < INFINITY:
            return -1
        other[:n] = second[b]
        if swap:
            d[:n] = discounts[b]
        if ranked:
            r[:n] = ranks[b]
        g[:] = ZERO
        whole = 0.0
        for i in range(n):
            if first[b, i] == -INFINITY or (kind == PAIR_ROWS and first[b, i] == ZERO):
                continue
            pair_weights(i, kind, first[b], other, d, r, swap, mu, ks[b], near, deep, part, w)
            own, terms, pull = v[i], ZERO, ZERO
            for j in range(len(v)):
                t = sigma * (v[j] - own)
                e = exp_negative(-abs(t))
                terms += w[j] * ((t if t > ZERO else ZERO) + log1p_unit(e))
                m = w[j] * (ONE if t >= ZERO else e) / (ONE + e)
                pull += m
                g[j] += m
            whole += terms
            g[i] -= pull
        losses[b] = whole
        if wants:
            for j in range(n):
                gradient[b, j] = sigma * g[j]
    return 0


@compiled
def count_lists(begin: Any, end: Any, first: Any, second: Any, counts: Any) -> None:
    """Write the number of pairs with first_i > second_j for lists begin <= b < end; -inf is in no pair as the first."""
    n = first.shape[1]
    for b in range(begin, end):
        found = 0
        for i in range(n):
            own = first[b, i]
            if own > -INFINITY:
                below = i32(0)
                for j in range(n):
                    below += i32(own > second[b, j])
                found += below
        counts[b] = found


@compiled
def pack_lists(begin: Any, end: Any, x: Any, mask: Any, packed: Any) -> Any:
    """Write integers whose ascending order is that of descending scores, masked items last, with their index below.

    Returns:
        Whether all valid scores are finite.
    """
    n = x.shape[1]
    masked = mask.shape[0] > 0
    finite = i32(1)
    for b in range(begin, end):
        for i in range(n):
            value = x[b, i] + ZERO  # -0 becomes 0
            real = not masked or mask[b, i]
            finite &= i32(abs(value) < INFINITY) | i32(not real)
            order = np.int64(~ordered(value)) if real else np.int64(0x7FFFFFFF)
            packed[b, i] = (order << np.int64(32)) | np.int64(i)
    return finite > 0


@compiled
def rank_lists(begin: Any, end: Any, packed: Any, valid: Any, ranks: Any) -> Any:
    """Write the ranks from sorted integers of `pack_lists`; return whether two valid scores of a list are equal."""
    n = packed.shape[1]
    ties = False
    for b in range(begin, end):
        for place in range(n):
            one = packed[b, place]
            ranks[b, one & np.int64(0xFFFFFFFF)] = f32(place + 1)
            if place > 0 and place < valid[b]:
                ties |= (one >> np.int64(32)) == (packed[b, place - 1] >> np.int64(32))
    return ties
