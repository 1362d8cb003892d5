"""Probability that a random subset of k items contains an item, as two logarithms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.dispatch import may_read
from recsys_topk.ops.selection.centred import centred
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.logistic import logistic_logs, logistic_threshold

# Used for log 0. It is finite, so that differences are not NaN, and far below every sum of scores in float32.
NEVER = -1e34


def subset_logs(scores: Tensor, k: int | Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p and log(1 - p), p_i the probability that item i is in a random subset of k items, (B, N) each.

    A subset has the weight exp(sum of its scores), so p_i = exp(x_i) e_{k-1}(without i) / e_k, with e_j the j-th
    elementary symmetric polynomial of exp(x). The polynomials are multiplied in a tree over the items. A second pass,
    from the root to the leaves, computes the product without each item. All values are logarithms relative to
    independent draws with the same expected number k. Such draws give exactly k items with a probability that is never
    small, so that nothing cancels or overflows. This takes O(k N) time and memory in O(log N) steps, and is
    differentiable to any order.

    Args:
        scores: (B, N), float32 or float64, 0 where masked.
        k: One int, or (B,) int64, with 1 <= k < number of valid items. A tensor off the CPU is not read, and the cost
            is then that of k = N.
        mask: Boolean (B, N).

    Example:
        >>> log_p, _ = subset_logs(torch.tensor([[1.0, 0.0, 0.0]]), 2, torch.ones(1, 3, dtype=torch.bool))
        >>> log_p.exp().round(decimals=4)
        tensor([[0.8446, 0.5777, 0.5777]])
    """
    ks = k if isinstance(k, Tensor) else torch.full(scores.shape[:1], k, device=scores.device)
    degree = k if not isinstance(k, Tensor) else int(k.max()) if may_read(k) else scores.shape[1] - 1
    filled = scores if is_full(mask) else fill_masked(scores, mask, -math.inf)
    x, gap = centred(filled, ks)
    # The threshold shifts the whole list, which does not change the result. It needs no gradient.
    threshold = logistic_threshold(x.detach(), gap, ks, torch.ones_like(gap)).detach()
    inside, outside = logistic_logs(torch.clamp_min(x - threshold, NEVER))
    leaves = torch.stack((outside, inside), -1)
    width = 1 << (scores.shape[1] - 1).bit_length()
    if width > scores.shape[1]:
        absent = x.new_zeros(len(x), width - scores.shape[1])
        leaves = torch.cat((leaves, torch.stack((absent, absent + NEVER), -1)), 1)
    levels = [leaves]
    while levels[-1].shape[1] > 1:
        levels.append(_product(levels[-1][:, ::2], levels[-1][:, 1::2], degree))
    # rest[j] is the coefficient k - j of the product of all items outside a node. Outside the root this product is 1.
    places = torch.arange(levels[-1].shape[2], device=x.device)
    rest = torch.where(places == ks[:, None], 0.0, torch.full_like(levels[-1][:, 0], NEVER))[:, None]
    for below in reversed(levels[:-1]):
        sides = (_remainder(rest, below[:, 1::2]), _remainder(rest, below[:, ::2]))
        rest = torch.stack(sides, 2).flatten(1, 2)
    rest = rest[:, : scores.shape[1]]
    return logistic_logs((inside + rest[..., 1]) - (outside + rest[..., 0]))


def _product(a: Tensor, b: Tensor, degree: int) -> Tensor:
    """Return the log coefficients 0..degree of the product of two polynomials of equal length, (B, nodes, D)."""
    terms = a.shape[2]
    m = torch.arange(min(2 * terms - 1, degree + 1), device=a.device)[:, None]
    j = torch.arange(terms, device=a.device)
    return _sum(a[:, :, None, :] + _take(b, m - j))


def _remainder(rest: Tensor, sibling: Tensor) -> Tensor:
    """Return the outside coefficients of a child: those of its parent times its sibling, (B, nodes, D)."""
    j = torch.arange(sibling.shape[2], device=rest.device)
    return _sum(sibling[:, :, None, :] + _take(rest, j[:, None] + j))


def _take(coefficients: Tensor, index: Tensor) -> Tensor:
    """Return the coefficients at `index`, any shape (p, q), as (B, nodes, p, q); `NEVER` where there is none."""
    size = coefficients.shape[2]
    extended = torch.nn.functional.pad(coefficients, (0, 1), value=NEVER)
    return extended[:, :, torch.where((index >= 0) & (index < size), index, size)]


def _sum(logs: Tensor) -> Tensor:
    return torch.logsumexp(logs, -1).clamp_min(NEVER)
