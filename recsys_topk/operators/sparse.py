"""Sparse top-k: the Euclidean projection of the scores on the k-subset polytope, exactly sparse."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.operators.base import SoftSelection, TopKOperator
from recsys_topk.ops.fill_masked import fill_masked
from recsys_topk.ops.kth_pair import kth_values
from recsys_topk.ops.opaque import opaque

MAX_STEPS = 100


class SparseTopK(TopKOperator):
    """Projection of x / tau on {0 <= p <= 1, sum p = k}: memberships of exactly 0 and 1 away from the threshold.

    p_i = clip(x_i / tau - t, 0, 1), t solves sum_i p_i = k (Sander et al. 2023 with p = 2; the isotonic form is the
    same map). Newton's method finds t, O(N) a pass, exact once the set of fractional items stops changing. The
    gradient is (g - mean of g) / tau over the fractional items, and 0 elsewhere. Inside cross-entropy the membership
    is clamped to [1e-6, 1 - 1e-6].

    Args:
        tau: Regularisation (l in the paper); smaller is sparser.
        validate: Raise on NaN or infinity among valid scores.

    Example:
        >>> import torch
        >>> SparseTopK(tau=2.0)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), k=2).p
        tensor([[1.0000, 0.2500, 0.7500, 0.0000]])
    """

    name: ClassVar[str] = "sparse"
    cost: ClassVar[str] = "n"
    paper: ClassVar[str] = "Sander et al. 2023, arXiv 2302.01425"

    def select(self, scores: Tensor, k: int | Tensor, mask: Tensor) -> SoftSelection:
        """See `TopKOperator.select`."""
        filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
        ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
        log_p, log_q = _SparseLogs.apply(filled, ks, self.tau)  # type: ignore[no-untyped-call]
        return SoftSelection(log_p, log_q, mask)


class _SparseLogs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, filled: Tensor, k: Tensor, tau: float) -> tuple[Tensor, Tensor]:
        z = filled / tau
        z = z - clip_threshold(z.detach(), k)
        ctx.save_for_backward(z)
        ctx.tau = tau
        return torch.log(z.clamp(0.0, 1.0)), torch.log((1.0 - z).clamp(0.0, 1.0))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_p: Tensor, grad_q: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        fractional = (z > 0.0) & (z < 1.0)
        safe = torch.where(fractional, z, 0.5)
        inner = torch.where(fractional, grad_p / safe - grad_q / (1.0 - safe), 0.0)
        mean = inner.sum(1, keepdim=True) / fractional.sum(1, keepdim=True).clamp_min(1)
        return (inner - fractional * mean) / ctx.tau, None, None


def _fake_threshold(z: Tensor, k: Tensor) -> Tensor:
    return z.new_empty((z.shape[0], 1))


@opaque(_fake_threshold)
def clip_threshold(z: Tensor, k: Tensor) -> Tensor:
    """Return t with sum_i clip(z_i - t, 0, 1) = k for each list, (B, 1), without gradient.

    Newton's method from the midpoint of the k-th pair, inside a bracket. The sum is piecewise linear in t, so a step
    is exact once no item becomes, or stops being, fractional.

    Args:
        z: (B, N), -inf where masked.
        k: (B,) int64, 1 <= k < number of valid items.
    """
    kept, cut = kth_values(z, k)
    wanted = k[:, None].to(z.dtype)
    # At t = x_[k+1] - 1 the k + 1 largest are all in, and at t = x_[k] at most k - 1 are.
    low, high = cut - 1.0, kept
    t = torch.minimum(torch.maximum(0.5 * (kept + cut) - 0.5, low), high)
    buffer, eps = torch.empty_like(z), torch.finfo(z.dtype).eps
    for _ in range(MAX_STEPS):
        torch.sub(z, t, out=buffer)
        inside = ((buffer > 0.0) & (buffer < 1.0)).sum(1, keepdim=True)
        excess = buffer.clamp_(0.0, 1.0).sum(1, keepdim=True) - wanted
        low, high = torch.where(excess > 0, t, low), torch.where(excess < 0, t, high)
        middle = 0.5 * (low + high)
        step = torch.where(inside > 0, t + excess / inside.clamp_min(1), middle)
        step = torch.where((step >= low) & (step <= high), step, middle)
        done = excess.abs() <= 4.0 * eps * wanted
        step = torch.where(done, t, step)
        if bool((step == t).all()):
            break
        t = step
    return t
