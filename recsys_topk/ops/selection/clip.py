"""The clipped membership of Sparse Top-K: log p and log(1 - p), and the threshold at which it sums to k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.ops.dispatch import may_read, operation
from recsys_topk.ops.selection.from_threshold import from_threshold

MAX_STEPS = 100
# Newton steps after the bisections, where values may not be read. Either the first guess is exact (z_[k] - z_[k+1] is 1
# or more), or the bracket is less than 2 wide. After one bisection per bit its middle is within eps / 2 of t, and the
# sum within N eps / 2 of k.
LAST_STEPS = 2


def clip_logs(x: Tensor, threshold: Tensor, tau: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p) of p = clip(x / tau - t, 0, 1), (B, N) each; no gradient where p is 0 or 1.

    Args:
        x: (B, N), -inf where masked.
        threshold: t, (B, 1), where the memberships sum to k; its derivative follows from that.
        tau: Temperature.
        weights: Weights of the items, (B, N); None = 1.
    """
    z = from_threshold(x, threshold * tau, tau, "uniform", weights)
    inside = (z > 0.0) & (z < 1.0)
    safe = torch.where(inside, z, 0.5)
    log_p = torch.where(inside, torch.log(safe), torch.where(z > 0.0, 0.0, -math.inf))
    return log_p, torch.where(inside, torch.log1p(-safe), torch.where(z > 0.0, -math.inf, 0.0))


@operation(fake=lambda z, gap, *_: torch.empty_like(gap))
def clip_threshold(z: Tensor, gap: Tensor, k: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return t with sum_i w_i clip(z_i - t, 0, 1) = k for each list, (B, 1), without gradient.

    Newton's method from the midpoint of the k-th pair, inside a bracket. The sum is piecewise linear in t, so a step
    is exact once no item becomes, or stops being, fractional. If values may not be read, the number of steps is
    fixed: the bracket is halved down to the precision of t.

    Args:
        z: (B, N), with z_[k+1] = 0 (see `centred`); -inf where masked.
        gap: (B, 1), z_[k] - z_[k+1].
        k: (B,) int64, 1 <= k < number of valid items; with weights, 0 < k < their sum.
        weights: w, (B, N), 0 where masked; None = 1.
    """
    wanted = k[:, None].to(z.dtype)
    # At t = z_[k+1] - 1 the k + 1 largest are all in, and at t = z_[k] at most k - 1 are.
    low, high = torch.full_like(gap, -1.0), gap
    t = 0.5 * gap - 0.5
    buffer, eps = torch.empty_like(z), torch.finfo(z.dtype).eps
    readable = may_read(z)
    halved = 0 if readable else 1 - round(math.log2(eps))
    for number in range(MAX_STEPS if readable else halved + LAST_STEPS):
        torch.sub(z, t, out=buffer)
        fractional, whole = (buffer > 0.0) & (buffer < 1.0), buffer.clamp_(0.0, 1.0)
        if weights is not None:
            fractional, whole = torch.where(fractional, weights, 0.0), whole.mul_(weights)
        inside = fractional.sum(1, keepdim=True)
        excess = whole.sum(1, keepdim=True) - wanted
        low, high = torch.where(excess >= 0, t, low), torch.where(excess <= 0, t, high)
        middle = 0.5 * (low + high)
        if number < halved:
            t = middle
            continue
        step = torch.where(inside > 0, t + excess / torch.where(inside > 0, inside, 1), middle)
        step = torch.where((step >= low) & (step <= high), step, middle)
        done = excess.abs() <= 4.0 * eps * wanted
        step = torch.where(done, t, step)
        if readable and bool((step == t).all()):
            break
        t = step
    return t
