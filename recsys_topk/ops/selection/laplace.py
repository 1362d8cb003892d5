"""The Laplace membership: log p and log(1 - p), and the threshold at which it sums to k."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import LOG2, LOWEST_EXPONENT
from recsys_topk.ops.dispatch import (
    closed_form,
    is_real,
    may_read,
    operation,
    through_reference,
    wants_graph,
)
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
    if weights is not None:
        return _reference(x, threshold, tau, weights)
    log_p, log_q = closed_form(_LaplaceLogs, _reference, x, threshold, tau)
    return log_p, log_q


def _reference(x: Tensor, threshold: Tensor, tau: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    u = from_threshold(x, threshold, tau, "laplace", weights)
    far = -u.abs()
    smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far))
    return torch.where(u > 0, larger, smaller), torch.where(u > 0, smaller, larger)


class _LaplaceLogs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        u = (x - threshold).mul_(1.0 / tau)
        far = -u.abs()
        # The smaller of p and 1 - p is exp(-|u|) / 2, the larger one minus that.
        smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far.clamp_min(LOWEST_EXPONENT[u.dtype])))
        above = above_zero(u)
        ctx.save_for_backward(x, threshold, u)
        ctx.tau = tau
        return torch.where(above, larger, smaller), torch.where(above, smaller, larger)

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> tuple[Tensor | None, ...]:
        x, threshold, u = ctx.saved_tensors
        if wants_graph():
            return through_reference(_reference, (x, threshold, ctx.tau), (grad_p, grad_q))
        far = u.abs()
        # Relative to the nearest item, so that the shares are finite however far all items are from the threshold.
        near = far.amin(1, keepdim=True)
        share = torch.exp((near - far).clamp_min_(LOWEST_EXPONENT[u.dtype]))
        e = share * torch.exp(-near)
        slope = e / (2.0 - e)  # of the log of the larger of p and 1 - p; that of the smaller is 1
        inner = torch.where(above_zero(u), grad_p * slope - grad_q, grad_p - grad_q * slope)
        weight = inner.sum(1, keepdim=True) / share.sum(1, keepdim=True)
        return (inner - share * weight) / ctx.tau, None, None


@operation
def above_zero(x: Tensor) -> Tensor:
    """Return x > 0; numpy compares several times faster than torch on a CPU."""
    return x > 0


@above_zero.backend("numpy", is_real)
def _above_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() > 0)


@operation
def sum_where(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum of the chosen entries of each row, (B, 1)."""
    return torch.where(chosen, x, 0.0).sum(1, keepdim=True)


# bincount adds sequentially in float64. A sum of float64 entries would be rounded N times, so it takes the reference.
@sum_where.backend("numpy", lambda x, chosen: is_real(x) and x.dtype == torch.float32)
def _sum_numpy(x: Tensor, chosen: Tensor) -> Tensor:
    places = chosen.numpy().reshape(-1).nonzero()[0]
    sums = np.bincount(places // x.shape[1], weights=x.numpy().reshape(-1)[places], minlength=x.shape[0])
    return torch.from_numpy(sums).to(x.dtype).unsqueeze(1)


def _fake_threshold(x: Tensor, gap: Tensor, k: Tensor, tau: float) -> Tensor:
    return torch.empty_like(gap)


@operation(fake=_fake_threshold)
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
        side = above_zero(buffer)
        above = count_true(side).unsqueeze(1)
        if readable and previous is not None and bool((above == previous).all()):
            break
        previous = above
        # Distances are taken from the nearest item, so that neither sum can vanish when all items are far away.
        buffer.abs_().mul_(-1.0 / tau)
        nearest = buffer.amax(1, keepdim=True)
        buffer.sub_(nearest).clamp_min_(lowest).exp_()
        total = buffer.sum(1, keepdim=True)
        upper = sum_where(buffer, side)
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
