"""The Laplace membership: log p and log(1 - p), and the threshold at which it sums to k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import LOG2, LOWEST_EXPONENT
from recsys_topk.ops.dispatch import may_read, operation
from recsys_topk.ops.selection.centred import halvings, threshold_bracket
from recsys_topk.ops.selection.count_true import count_true
from recsys_topk.ops.selection.from_threshold import from_threshold

MAX_STEPS = 100
# Steps after the bisections, where values may not be read. Over a distance d the slope of the sum changes by at most a
# factor e^(d / tau), so a step from a distance e tau ends within 2 e^e (cosh e - 1) tau. From 1/2 (see `halvings`) the
# distances are .421, .274, .0991, .0109, 1.2e-4, 1.5e-8, 2e-16.
LAST_STEPS = 8


def laplace_logs(x: Tensor, threshold: Tensor, tau: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return log F(u) and log F(-u) at u = (x - b) / tau, F the Laplace distribution function, (B, N) each.

    Args:
        x: (B, N), -inf where masked.
        threshold: b, (B, 1), where the memberships sum to k; its derivative follows from that.
        tau: Temperature.
        weights: Weights of the items, (B, N); None = 1.
    """
    u = from_threshold(x, threshold, tau, "laplace", weights)
    far = -u.abs()
    smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far))
    return torch.where(u > 0, larger, smaller), torch.where(u > 0, smaller, larger)


@operation(fake=lambda x, gap, *_: torch.empty_like(gap))
def laplace_threshold(x: Tensor, gap: Tensor, k: Tensor, tau: float) -> Tensor:
    """Return b with sum_i F((x_i - b) / tau) = k for each list, (B, 1), without gradient.

    From a guess b, with A the sum of exp(-(x_i - b) / tau) over the items above it, C the sum of exp(-(b - x_i) / tau)
    over the others and w = #{x_i > b} - k, the b that satisfies the equation while no item changes side is
    b + tau log t with A t^2 - 2 w t - C = 0. The step never overshoots, and is exact once no item changes side. If
    values may not be read, the number of steps is fixed: the bracket is halved until the steps are known to converge.

    Args:
        x: (B, N), with x_[k+1] = 0 (see `centred`); -inf where masked.
        gap: (B, 1), x_[k] - x_[k+1].
        k: (B,) int64, 1 <= k < number of valid items.
        tau: Temperature.
    """
    readable = may_read(x)
    b, steps, halved = 0.5 * gap, MAX_STEPS, 0
    if not readable:
        low, high = threshold_bracket(gap, k, (x > -math.inf).sum(1, keepdim=True), tau)
        b, halved = 0.5 * (low + high), halvings(x.shape[1], k, x.dtype)
        steps = halved + LAST_STEPS
    wanted, tiny, lowest = k[:, None], torch.finfo(x.dtype).tiny, LOWEST_EXPONENT[x.dtype]
    buffer, previous = torch.empty_like(x), None
    for step in range(steps):
        torch.sub(x, b, out=buffer)
        side = buffer > 0
        above = count_true(side).unsqueeze(1)
        if readable and previous is not None and bool((above == previous).all()):
            break
        previous = above
        # Distances are taken from the nearest item, so that neither sum can vanish when all items are far away.
        buffer.abs_().mul_(-1.0 / tau)
        nearest = buffer.amax(1, keepdim=True)
        buffer.sub_(nearest).clamp_min_(lowest).exp_()
        total = buffer.sum(1, keepdim=True)
        upper = torch.where(side, buffer, 0.0).sum(1, keepdim=True)
        lower = (total - upper).clamp_min_(tiny)
        upper.clamp_min_(tiny)
        # In units of exp(nearest): A = upper e, C = lower e with e = exp(nearest).
        spare = (above - wanted).to(x.dtype) * torch.exp((-nearest).clamp_max(-0.45 * lowest))
        if step < halved:
            excess = spare + 0.5 * (lower - upper)
            low, high = torch.where(excess >= 0, b, low), torch.where(excess <= 0, b, high)
            b = 0.5 * (low + high)
            continue
        root = torch.sqrt(spare * spare + upper * lower)
        ratio = torch.where(spare >= 0, (spare + root) / upper, lower / (root - spare))
        b = b + tau * torch.log(ratio)
    return b
