"""LapSum: a membership by the Laplace distribution function that sums to k exactly."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from recsys_topk.numerics import LOG2, LOWEST_EXPONENT, is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.count_true import count_true
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.kth_pair import kth_values
from recsys_topk.ops.opaque import opaque

MAX_STEPS = 100


class LapSum(TopKOperator):
    """Laplace membership around the threshold at which it sums to k.

    p_i = F((x_i - b) / tau), F the distribution function of the standard Laplace law, b solves sum_i p_i = k. With
    e_i = exp(-|x_i - b| / tau) the gradient of the threshold is db/dx_i = e_i / sum_j e_j. The threshold is found
    without a sort, in two to four passes over the list, O(N) each (see `laplace_threshold`).

    Args:
        tau: Temperature (alpha in the paper; larger is smoother).
        validate: Raise on NaN or infinity among valid scores.

    Example:
        >>> import torch
        >>> LapSum()(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p.round(decimals=3)
        tensor([[0.8880, 0.3030, 0.6970, 0.1120]])
    """

    name: ClassVar[str] = "lapsum"
    cost: ClassVar[str] = "n"
    paper: ClassVar[str] = "Struski et al. 2025, arXiv 2503.06242"

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
        log_p, log_q = _LaplaceLogs.apply(filled, ks, self.tau)  # type: ignore[no-untyped-call]
        return SoftSelection(log_p, log_q, mask)


class _LaplaceLogs(torch.autograd.Function):
    """log F(u) and log F(-u) at u = (x - b(x)) / tau, with the implicit derivative of b."""

    @staticmethod
    def forward(ctx: Any, filled: Tensor, k: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        u = (filled - laplace_threshold(filled.detach(), k, tau)).mul_(1.0 / tau)
        far = -u.abs()
        # The smaller of p and 1 - p is exp(-|u|) / 2, the larger one minus that.
        smaller, larger = far - LOG2, torch.log1p(-0.5 * torch.exp(far.clamp_min(LOWEST_EXPONENT[u.dtype])))
        above = _positive(u)
        ctx.save_for_backward(u)
        ctx.tau = tau
        return torch.where(above, larger, smaller), torch.where(above, smaller, larger)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> tuple[Tensor, None, None]:
        (u,) = ctx.saved_tensors
        far = u.abs()
        # Scaled by the nearest item, so that the shares exist however far all items are from the threshold.
        near = far.amin(1, keepdim=True)
        share = torch.exp((near - far).clamp_min_(LOWEST_EXPONENT[u.dtype]))
        e = share * torch.exp(-near)
        slope = e / (2.0 - e)  # of the log of the larger of p and 1 - p; that of the smaller is 1
        inner = torch.where(_positive(u), grad_p * slope - grad_q, grad_p - grad_q * slope)
        weight = inner.sum(1, keepdim=True) / share.sum(1, keepdim=True)
        return (inner - share * weight) / ctx.tau, None, None


def _positive(x: Tensor) -> Tensor:
    """Return x > 0; numpy compares several times faster than torch on CPU."""
    return torch.from_numpy(x.numpy() > 0) if may_read(x) else x > 0


def _sum_where(x: Tensor, chosen: Tensor) -> Tensor:
    """Return the sum of the chosen entries of each row, (B, 1)."""
    if not may_read(x):
        return torch.where(chosen, x, 0.0).sum(1, keepdim=True)
    places = chosen.numpy().reshape(-1).nonzero()[0]
    sums = np.bincount(places // x.shape[1], weights=x.numpy().reshape(-1)[places], minlength=x.shape[0])
    return torch.from_numpy(sums).to(x.dtype).unsqueeze(1)


def _fake_threshold(filled: Tensor, k: Tensor, tau: float) -> Tensor:
    return filled.new_empty((filled.shape[0], 1))


@opaque(_fake_threshold)
def laplace_threshold(filled: Tensor, k: Tensor, tau: float) -> Tensor:
    """Return b with sum_i F((x_i - b) / tau) = k for each list, (B, 1), without gradient.

    From a guess b, with A the sum of exp(-(x_i - b) / tau) over the items above it, C the sum of exp(-(b - x_i) / tau)
    over the others and w = #{x_i > b} - k, the b that satisfies the equation while no item changes side is
    b + tau log t with A t^2 - 2 w t - C = 0. The step never overshoots, and is exact once no item changes side.

    Args:
        filled: (B, N), -inf where masked.
        k: (B,) int64, 1 <= k < number of valid items.
        tau: Temperature.
    """
    kept, cut = kth_values(filled, k)
    b = cut + 0.5 * (kept - cut)
    wanted, tiny, lowest = k[:, None], torch.finfo(filled.dtype).tiny, LOWEST_EXPONENT[filled.dtype]
    buffer, previous = torch.empty_like(filled), None
    for _ in range(MAX_STEPS):
        torch.sub(filled, b, out=buffer)
        side = _positive(buffer)
        above = count_true(side).unsqueeze(1)
        if previous is not None and bool((above == previous).all()):
            break
        previous = above
        # Distances are taken from the nearest item, so that neither sum can vanish when all items are far away.
        buffer.abs_().mul_(-1.0 / tau)
        nearest = buffer.amax(1, keepdim=True)
        buffer.sub_(nearest).clamp_min_(lowest).exp_()
        total = buffer.sum(1, keepdim=True)
        upper = _sum_where(buffer, side)
        lower = (total - upper).clamp_min_(tiny)
        upper.clamp_min_(tiny)
        # In units of exp(nearest): A = upper e, C = lower e with e = exp(nearest).
        spare = (above - wanted).to(filled.dtype) * torch.exp((-nearest).clamp_max(-0.45 * lowest))
        root = torch.sqrt(spare * spare + upper * lower)
        ratio = torch.where(spare >= 0, (spare + root) / upper, lower / (root - spare))
        b = b + tau * torch.log(ratio)
    return b
