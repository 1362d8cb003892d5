"""Functions for kernels in which a program holds some whole lists, (ROWS, BLOCK), and reduces over their items.

Lists are padded to BLOCK. The scores of masked and padded items are -inf, and their key is 0. Numbers of a list are
(ROWS,) vectors. All arithmetic is in float32, and every loop has a fixed number of steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

LAWS = {"dftopk": 0, "logistic": 1, "laplace": 2, "clip": 3, "fenchel_young": 4}
DFTOPK, LOGISTIC, LAPLACE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
CLIP, FENCHEL_YOUNG = tl.constexpr(3), tl.constexpr(4)

# Number of steps of `balance` that at least halve the error, and of the following steps, which square it.
HALVING, SQUARING = tl.constexpr(5), tl.constexpr(5)
BISECTIONS = tl.constexpr(25)
CLAMP = tl.constexpr(1e-6)  # as in recsys_topk.ops.losses.topk_loss
LOG_2 = tl.constexpr(0.6931471805599453)
LEAST = tl.constexpr(0.25)  # lower bound of the density of the nearest item

# Options of the compiler. The default of this one differs between versions.
OPTIONS = {"enable_fp_fusion": True}

# Short lists share a program up to this many items; each longer list has its own program.
TOGETHER = 512


def tiling(n: int) -> dict[str, int]:
    """Return the constants ROWS and BLOCK, and the options of the compiler, for lists of n items."""
    block = max(16, triton.next_power_of_2(n))
    rows = max(1, TOGETHER // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 256)), **OPTIONS}


def bytes_of(x: Tensor) -> Tensor:
    """Return a view of a boolean tensor as bytes."""
    return x.contiguous().view(torch.uint8)


@triton.jit
def log1p_unit(x):
    """Return log(1 + x) for 0 <= x <= 1, with a relative error of 3e-8 (a weighted least-squares fit)."""
    y = x * 0.0052326294 - 0.029504986
    y = y * x + 0.07822556
    y = y * x - 0.13663214
    y = y * x + 0.19105993
    y = y * x - 0.24842979
    y = y * x + 0.33319098
    y = y * x - 0.49999493
    return (y * x + 1.0) * x


@triton.jit
def order_key(x):
    """Return uint32 numbers above 0 in the order of the float32 numbers."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def kth_key(key, k, ROWS: tl.constexpr):  # noqa: N803
    """Return the k-th largest key of each list, (ROWS,), from the highest bit to the lowest; 0 if there are fewer."""
    found = tl.zeros([ROWS], tl.uint32)
    for bit in range(32):
        trial = found | (tl.full([ROWS], 1, tl.uint32) << (31 - bit))
        reached = tl.sum((key >= trial[:, None]).to(tl.int32), axis=1) >= k
        found = tl.where(reached, trial, found)
    return found


@triton.jit
def kth_pair(x, real, k, ROWS: tl.constexpr):  # noqa: N803
    """Return x_[k] and x_[k+1], (ROWS,) each, for 1 <= k < number of valid items; undefined for other k."""
    key = tl.where(real, order_key(x), 0)
    found = kth_key(key, k, ROWS)[:, None]
    kept = tl.max(tl.where(key == found, x, float("-inf")), axis=1)
    below = tl.max(tl.where(key < found, x, float("-inf")), axis=1)
    return kept, tl.where(tl.sum((key >= found).to(tl.int32), axis=1) > k, kept, below)


@triton.jit
def true_items(y, positive, positives, k, ROWS: tl.constexpr):  # noqa: N803
    """Return which positives have one of the k largest labels of their list, ties at the boundary included."""
    true = positive
    if tl.max((positives > k).to(tl.int32), axis=0) > 0:
        key = tl.where(positive, order_key(y), 0)
        true = positive & (key >= kth_key(key, k, ROWS)[:, None])
    return true


@triton.jit
def clamp(p):
    """Return a clipped membership as it enters a cross-entropy."""
    return tl.minimum(tl.maximum(p, CLAMP), 1.0 - CLAMP)


@triton.jit
def tails(u, LAW: tl.constexpr):  # noqa: N803
    """Return log p, log q, d log p / du and -d log q / du at u, q = 1 - p; DFTOPK has the tails of LOGISTIC.

    Under CLIP p is clamped to [1e-6, 1 - 1e-6], and clamped items have the derivative 0.
    """
    e = tl.exp(-tl.abs(u))
    up = u > 0.0
    if LAW == CLIP:
        p, q = clamp(u), clamp(1.0 - u)
        free = (p == u) & (q == 1.0 - u)
        log_p, log_q = tl.log(p), tl.log(q)
        rise, fall = tl.where(free, 1.0 / p, 0.0), tl.where(free, 1.0 / q, 0.0)
    elif LAW == LAPLACE:
        smaller, larger = -tl.abs(u) - LOG_2, tl.log(1.0 - 0.5 * e)
        slope = e / (2.0 - e)
        log_p, log_q = tl.where(up, larger, smaller), tl.where(up, smaller, larger)
        rise, fall = tl.where(up, slope, 1.0), tl.where(up, 1.0, slope)
    else:
        soft, inverse = log1p_unit(e), 1.0 / (1.0 + e)
        log_p, log_q = tl.minimum(u, 0.0) - soft, tl.minimum(-u, 0.0) - soft
        rise, fall = tl.where(up, e, 1.0) * inverse, tl.where(up, 1.0, e) * inverse
    return log_p, log_q, rise, fall


@triton.jit
def balance(z, real, tied, larger, gap, k, LAW: tl.constexpr):  # noqa: N803
    """Return b with sum_i F(z_i - b) = k, (ROWS,), F the distribution function of the LOGISTIC or LAPLACE law.

    With T the k largest items and R the others (items that tie for the k-th place are in both, in part), the sum is k
    where h(b) = log sum_R p_i - log sum_T (1 - p_i) is 0. -h' is the mean of 1 - p over R plus that of p over T
    (LAPLACE: of f / p and f / (1 - p)), weighted by the terms of the sums. No 1 - p_i in T exceeds one in R, so -h' is
    in [1, 2]. This also holds for the LAPLACE law, where one of the two means is 1.

    At the midpoint of the k-th pair abs(h) <= log n. A step of 3/4 h at least halves the error: five of them leave 0.3
    for n = 8192. abs(h'') <= 1/2 (LAPLACE: 9/4), so a Newton step turns the error e into at most e^2 / 4 (LAPLACE:
    9/8 e^2): less than 1e-8 after four, and there are five.

    Args:
        z: (x - x_[k+1]) / tau, -inf where masked.
        real: Which items are valid.
        tied: Which items are equal to x_[k].
        larger: Which items are larger than x_[k].
        gap: z_[k], (ROWS,).
        k: 1 <= k < number of valid items, (ROWS,).
        LAW: LOGISTIC or LAPLACE.
    """
    places = k - tl.sum(larger.to(tl.int32), axis=1)
    part = places.to(tl.float32) / tl.sum(tied.to(tl.int32), axis=1).to(tl.float32)
    top = tl.where(tied, part[:, None], tl.where(larger, 1.0, 0.0))
    rest = tl.where(real, 1.0 - top, 0.0)
    b = 0.5 * gap
    for _ in range(HALVING):
        h, slope = balance_at(z, top, rest, gap, b, LAW)
        b += 0.75 * h
    for _ in range(SQUARING):
        h, slope = balance_at(z, top, rest, gap, b, LAW)
        b += h / slope
    return b


@triton.jit
def balance_at(z, top, rest, gap, b, LAW: tl.constexpr):  # noqa: N803
    """Return h and -h' of `balance` at b; `top` and `rest` are the shares of the items in T and R."""
    log_p, log_q, rise, fall = tails(z - b[:, None], LAW)
    at_cut, _, _, _ = tails(-b, LAW)  # the largest log p of R, and the largest log q of T
    _, at_kept, _, _ = tails(gap - b, LAW)
    p = tl.where(rest > 0.0, rest * tl.exp(log_p - at_cut[:, None]), 0.0)
    q = tl.where(top > 0.0, top * tl.exp(log_q - at_kept[:, None]), 0.0)
    sum_p, sum_q = tl.sum(p, axis=1), tl.sum(q, axis=1)
    slope = tl.sum(p * rise, axis=1) / sum_p + tl.sum(q * fall, axis=1) / sum_q
    return tl.log(sum_p / sum_q) + (at_cut - at_kept), slope


@triton.jit
def clip_threshold(z, gap, k):
    """Return t with sum_i clip(z_i - t, 0, 1) = k, (ROWS,).

    If z_[k] - z_[k+1] is 1 or more, the midpoint minus 1/2 is exact. Otherwise t is in [-1, gap]: 25 bisections leave
    an interval of 6e-8, and Newton's steps inside it are exact, because the sum is piecewise linear.

    Args:
        z: (x - x_[k+1]) / tau, -inf where masked.
        gap: z_[k], (ROWS,).
        k: 1 <= k < number of valid items, (ROWS,).
    """
    t = 0.5 * gap - 0.5
    low, high = tl.where(gap >= 1.0, t, -1.0), tl.where(gap >= 1.0, t, gap)
    wanted = k.to(tl.float32)
    for _ in range(BISECTIONS):
        excess, _ = clip_excess(z, t, wanted)
        low, high = tl.where(excess >= 0.0, t, low), tl.where(excess <= 0.0, t, high)
        t = 0.5 * (low + high)
    for _ in range(2):
        excess, inside = clip_excess(z, t, wanted)
        t = tl.minimum(tl.maximum(t + excess / tl.maximum(inside, 1.0), low), high)
    return t


@triton.jit
def clip_excess(z, t, wanted):
    """Return sum_i clip(z_i - t, 0, 1) - wanted, and the number of fractional items, (ROWS,) each."""
    u = z - t[:, None]
    excess = tl.sum(tl.minimum(tl.maximum(u, 0.0), 1.0), axis=1) - wanted
    return excess, tl.sum(((u > 0.0) & (u < 1.0)).to(tl.float32), axis=1)


@triton.jit
def item_terms(x, real, true, kept, cut, k, tau, alpha, LAW: tl.constexpr):  # noqa: N803
    """Return u, the loss of each item, its derivative d with respect to u, and the derivative w of the threshold.

    The derivative of the loss of a list with respect to x_i is (d_i - w_i sum_j d_j) / tau. Where masked, all but u are
    0. See `recsys_topk.ops.backends.compiled` for the formulas.

    Args:
        x: Scores, -inf where masked.
        real: Which items are valid.
        true: Which items are true.
        kept: x_[k], (ROWS,).
        cut: x_[k+1], (ROWS,).
        k: (ROWS,).
        tau: Temperature.
        alpha: Of the DFTOPK law.
        LAW: Which law.
    """
    if LAW == DFTOPK:
        # Differences of scores are exact far from 0, and a threshold there would be rounded.
        u = ((x - cut[:, None]) - (alpha * (kept - cut))[:, None]) / tau
        at_kept, at_cut = real & (x == kept[:, None]), real & (x == cut[:, None])
        per_kept = alpha / tl.sum(at_kept.to(tl.float32), axis=1)
        per_cut = (1.0 - alpha) / tl.sum(at_cut.to(tl.float32), axis=1)
        w = tl.where(at_kept, per_kept[:, None], 0.0) + tl.where(at_cut, per_cut[:, None], 0.0)
    else:
        z, gap = (x - cut[:, None]) / tau, (kept - cut) / tau
        if (LAW == LOGISTIC) | (LAW == LAPLACE):
            tied, larger = real & (x == kept[:, None]), real & (x > kept[:, None])
            u = z - balance(z, real, tied, larger, gap, k, LAW)[:, None]
        else:
            u = z - clip_threshold(z, gap, k)[:, None]
        w = density(u, real, LAW)
        w = w / tl.maximum(tl.sum(w, axis=1), LEAST)[:, None]
    item, d = law_terms(u, real, true, tau, LAW)
    return u, item, d, w


@triton.jit
def density(u, real, LAW: tl.constexpr):  # noqa: N803
    """Return the derivative of the threshold with respect to the scores, up to a factor, for all laws but DFTOPK.

    It is relative to the nearest item, so that it is finite however far all items are. The sum over the items is at
    least LEAST, or 0.
    """
    if (LAW == LOGISTIC) | (LAW == LAPLACE):
        far = tl.where(real, tl.abs(u), float("inf"))
        w = tl.where(real, tl.exp(tl.min(far, axis=1)[:, None] - far), 0.0)
        if LAW == LOGISTIC:
            inverse = 1.0 / (1.0 + tl.exp(-far))
            w = w * inverse * inverse
    elif LAW == CLIP:
        w = tl.where(real & (u > 0.0) & (u < 1.0), 1.0, 0.0)
    else:
        w = tl.zeros_like(u)
    return w


@triton.jit
def law_terms(u, real, true, tau, LAW: tl.constexpr):  # noqa: N803
    """Return the loss of each item, and its derivative d with respect to u; 0 where masked."""
    sign = tl.where(true, -1.0, 1.0)
    if (LAW == DFTOPK) | (LAW == LOGISTIC):
        t = sign * u
        e = tl.exp(-tl.abs(t))
        item = tl.maximum(t, 0.0) + log1p_unit(e)
        d = sign * tl.where(t >= 0.0, 1.0, e) / (1.0 + e)
    elif LAW == LAPLACE:
        t = sign * u
        e = tl.exp(-tl.abs(t))
        m = tl.where(t >= 0.0, 1.0, e / (2.0 - e))  # -log F(-t) = max(t, 0) + log(1 + m)
        item = tl.maximum(t, 0.0) + log1p_unit(m)
        d = sign * m
    elif LAW == CLIP:
        p = tl.minimum(tl.maximum(u, 0.0), 1.0)
        chosen = tl.where(true, p, 1.0 - p)
        clamped = clamp(chosen)
        item = -tl.log(clamped)
        d = tl.where((chosen == clamped) & (u > 0.0) & (u < 1.0), sign / clamped, 0.0)
    else:
        wrong = tl.maximum(tl.where(true, 1.0 - u, u), 0.0)
        item = tau * tl.where(wrong >= 1.0, wrong - 0.5, 0.5 * wrong * wrong)
        d = tau * (tl.minimum(tl.maximum(u, 0.0), 1.0) - tl.where(true, 1.0, 0.0))
    return tl.where(real, item, 0.0), tl.where(real, d, 0.0)
