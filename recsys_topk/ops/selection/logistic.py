"""The logistic membership: log p and log(1 - p) of a logit, and the threshold at which it sums to k."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from recsys_topk.numerics import LOWEST_EXPONENT
from recsys_topk.ops.dispatch import apply, may_read, operation, save
from recsys_topk.ops.selection.centred import halvings, threshold_bracket

MAX_STEPS = 80
# Newton steps after the bisections, where values may not be read. Over a distance d the slope of the sum changes by at
# most a factor e^(d / tau), so a step from a distance e tau ends within (e^e - 1 - e) tau. From 1/2 (see `halvings`)
# the distances are .149, .0117, 6.8e-5, 2.3e-9, 2.7e-18.
LAST_STEPS = 6


def logistic_logs(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return log sigmoid(z) and log sigmoid(-z) from one logarithm, exact in both tails.

    Example:
        >>> logistic_logs(torch.tensor([1.0, 200.0]))[1]
        tensor([  -1.3133, -200.0000])
    """
    log_p, log_q = apply(_LogisticLogs, z)
    return log_p, log_q


class _LogisticLogs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(z: Tensor) -> tuple[Tensor, Tensor]:
        # exp is slow on a CPU where it underflows; below the bound log1p(exp) is smaller than any normal number.
        soft = torch.log1p(torch.exp(torch.clamp_min(-z.abs(), LOWEST_EXPONENT[z.dtype])))
        return torch.clamp_max(z, 0.0) - soft, torch.clamp_max(-z, 0.0) - soft

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor]) -> None:
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return grad_p * torch.sigmoid(-z) - grad_q * torch.sigmoid(z)

    @staticmethod
    def tangents(ctx: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        (z,) = ctx.saved_tensors
        return tangent * torch.sigmoid(-z), -tangent * torch.sigmoid(z)


@operation(fake=lambda x, gap, *_: torch.empty_like(gap))
def logistic_threshold(x: Tensor, gap: Tensor, k: Tensor, tau: Tensor) -> Tensor:
    """Return b with sum_i sigmoid((x_i - b) / tau) = k for each list, (B, 1), without gradient.

    Newton's method inside a bracket that holds the root (`threshold_bracket`). A step that leaves the bracket is
    replaced by one that takes both tails as exponential. It is exact for items far from b and never overshoots. If
    values may not be read, the number of steps is fixed: the bracket is halved until Newton's method is known to
    converge.

    Args:
        x: (B, N), with x_[k+1] = 0 (see `centred`); -inf where masked.
        gap: (B, 1), x_[k] - x_[k+1].
        k: (B,) int64, 1 <= k < number of valid items.
        tau: (B, 1), positive.
    """
    wanted = k[:, None].to(x.dtype)
    count = (x > -math.inf).sum(1, keepdim=True).to(x.dtype)
    low, high = threshold_bracket(gap, k, count, tau)
    readable = may_read(x)
    halved = 0 if readable else halvings(x.shape[1], k, x.dtype)
    b = torch.minimum(torch.maximum(0.5 * gap, low), high) if readable else 0.5 * (low + high)
    tiny, eps = torch.finfo(x.dtype).tiny, torch.finfo(x.dtype).eps
    for number in range(MAX_STEPS if readable else halved + LAST_STEPS):
        # `small` is the smaller of p and 1 - p. The sum is k if the two sides of b balance; nothing cancels.
        z = (x - b).div_(tau)
        above = z > 0
        small = z.abs_().neg_().sigmoid_()
        missing = torch.where(above, small, 0.0).sum(1, keepdim=True)
        leaking = torch.where(above, 0.0, small).sum(1, keepdim=True)
        spare = above.sum(1, keepdim=True) - wanted
        excess = spare + (leaking - missing)
        low, high = torch.where(excess >= 0, b, low), torch.where(excess <= 0, b, high)
        if number < halved:
            b = 0.5 * (low + high)
            continue
        slope = torch.addcmul(small, small, small, value=-1.0).sum(1, keepdim=True) / tau
        step = b + excess / slope.clamp_min(tiny)
        if not readable:  # clipping a step to the bracket moves it closer to the root
            b = torch.minimum(torch.maximum(step, low), high)
            continue
        outside = ~((step >= low) & (step <= high))
        if bool(outside.any()):
            root = torch.sqrt(spare * spare + 4.0 * missing * leaking)
            grown = (spare + root) / (2.0 * missing).clamp_min(tiny)
            shrunk = 2.0 * leaking / (root - spare).clamp_min(tiny)
            careful = b + tau * torch.log(torch.where(spare >= 0, grown, shrunk).clamp_min(tiny))
            careful = torch.where((careful > low) & (careful < high), careful, 0.5 * (low + high))
            step = torch.where(outside, careful, step)
        moved = (step - b).abs()
        b = step
        if bool((moved <= 4.0 * eps * torch.maximum(b.abs(), tau)).all()):
            break
    return b
