"""The two terms of ARF: a relaxed recall at a quota, and the cross-entropy of the whole order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.backends.jit import Loop
from recsys_topk.ops.backends.parallel import number_of_parts, run_parts
from recsys_topk.ops.backends.task import WIDTH
from recsys_topk.ops.dispatch import is_float32, is_real, operation
from recsys_topk.ops.losses.known_gradient import known_gradient

ROWS = 16  # of the buffer of the compiled loop
SMALLEST_EPS = 1e-30  # the compiled loop takes logarithms of normal numbers only

_LISTS = Loop("recsys_topk.ops.backends.compiled.neural:arf_lists")


@operation
def arf_terms(
    scores: Tensor, labels: Tensor, mask: Tensor, target: Tensor, quota: Tensor, tau: float, eps: float, both: bool
) -> Tensor:
    """Return L_relax and L_global of each list, (2, B); see `recsys_topk.losses.arf`. The reference takes N^2 memory.

    Args:
        scores: (B, N), 0 where masked.
        labels: (B, N).
        mask: Boolean (B, N).
        target: (B, N), 1 for true items, otherwise 0.
        quota: (B,) int64.
        tau: Temperature of NeuralSort.
        eps: Added inside each logarithm.
        both: Whether L_relax has two sides (ARF-v2).
    """
    n = mask.sum(1)
    ranks = torch.arange(1, scores.shape[1] + 1, device=scores.device)
    p = neuralsort_matrix(scores, mask, n, ranks, tau)
    first = ranks[:, None] <= quota[:, None, None]
    relax = relaxed_recall(p, (target, 1.0 - target), mask, first, quota, n, eps, both)
    # Tied labels occupy ranks ahead + 1 .. ahead + size and get a share of 1 / size of each.
    pairs = mask[:, :, None] & mask[:, None, :]
    ahead = (pairs & (labels[:, :, None] < labels[:, None, :])).sum(2)
    size = (pairs & (labels[:, :, None] == labels[:, None, :])).sum(2).clamp_min(1)
    inside = (ranks[:, None] > ahead[:, None, :]) & (ranks[:, None] <= (ahead + size)[:, None, :])
    share = (inside & mask[:, None, :]) / size[:, None, :].to(p.dtype)
    order = -(share * torch.log(p + eps)).sum((1, 2)) / (n * n)
    return torch.stack((relax, order))


def relaxed_recall(
    p: Tensor,
    shares: tuple[Tensor, Tensor],
    mask: Tensor,
    first: Tensor,
    quota: Tensor,
    n: Tensor,
    eps: float,
    both: bool,
) -> Tensor:
    """Return L_relax, (B,), from a matrix (B, rank, item), the shares of true and other items, and the first rows."""
    up = torch.where(first, p, 0.0).sum(1)
    if not both:
        return -(shares[0] * torch.log(up / quota[:, None] + eps)).sum(1) / n
    down = torch.where(first, 0.0, p).sum(1)
    total = (up + down).detach() + eps
    terms = shares[0] * torch.log(up / total + eps) + shares[1] * torch.log(down / total + eps)
    return -torch.where(mask, terms, 0.0).sum(1) / n


def neuralsort_matrix(scores: Tensor, mask: Tensor, n: Tensor, ranks: Tensor, tau: float) -> Tensor:
    """Return the NeuralSort matrix, (B, rank, item); 0 for masked items and ranks above the number of valid items."""
    x = torch.where(mask, scores - scores.sum(1, keepdim=True).detach() / n[:, None], 0.0)
    distance = torch.where(mask[:, None, :], (x[:, :, None] - x[:, None, :]).abs(), 0.0).sum(2)
    slope = (n[:, None] + 1 - 2 * ranks).to(x.dtype)
    logits = (slope[:, :, None] * x[:, None, :] - distance[:, None, :]) / tau
    logits = torch.where(mask[:, None, :], logits, -math.inf)
    return torch.where(mask[:, None, :] & (ranks <= n[:, None])[:, :, None], torch.softmax(logits, 2), 0.0)


def _serves(
    scores: Tensor, labels: Tensor, mask: Tensor, target: Tensor, quota: Tensor, tau: float, eps: float, both: bool
) -> bool:
    known = is_real(mask) and is_real(quota) and scores.numel() > 0 and eps >= SMALLEST_EPS
    return known and is_float32(scores, labels, target)


@arf_terms.backend("numba", _serves)
def _numba(
    scores: Tensor, labels: Tensor, mask: Tensor, target: Tensor, quota: Tensor, tau: float, eps: float, both: bool
) -> Tensor:
    lists, n = scores.shape
    x, real = scores.detach().contiguous(), None if is_full(mask) else mask.contiguous()
    value = torch.empty(2, lists)
    gradient = torch.empty(2, lists, n) if scores.requires_grad and torch.is_grad_enabled() else None
    size = -(-n // WIDTH) * WIDTH
    buffers = torch.empty(number_of_parts(lists), ROWS, size)
    given = (x, labels.contiguous(), real, target.contiguous(), quota.contiguous(), 1.0 / tau, float(eps), int(both))
    run_parts(_LISTS, lists, n, *given, buffers, size, value, gradient, lists)
    rest = (labels, mask, target, quota, tau, eps, both)
    return known_gradient(scores, value, gradient, lambda x: arf_terms.reference(x, *rest))
