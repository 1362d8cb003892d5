"""Kendall's tau between scores and labels."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.checks import check_lists
from recsys_topk.numerics import full_mask

# Maximum number of pairwise comparisons (booleans) per chunk of lists.
PAIRS_AT_A_TIME = 1 << 22


def kendall_tau(scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return Kendall's tau between scores and labels, per list.

    tau = (concordant - discordant) / (pairs of valid items with different labels). Pairs with equal scores are neither
    concordant nor discordant, so constant scores give 0. A perfect order gives 1 even with tied labels (this is
    Somers' D of the scores given the labels; without ties it is Kendall's tau). Lists with two different
    labels are counted. O(N^2) time; the memory does not grow with the number of lists.

    Args:
        scores: (B, N).
        labels: (B, N).
        mask: (B, N).

    Example:
        >>> kendall_tau(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]]))[0]
        tensor([0.3333], dtype=torch.float64)
    """
    check_lists(scores, mask, labels=labels)
    valid = full_mask(scores) if mask is None else mask
    lists, n = scores.shape
    step = max(1, PAIRS_AT_A_TIME // max(1, n * n))
    agreement = [
        _agreement(scores[i : i + step], labels[i : i + step], valid[i : i + step]) for i in range(0, lists, step)
    ]
    if not agreement:
        empty = torch.zeros(0, dtype=torch.float64, device=scores.device)
        return empty, empty.bool()
    difference = torch.cat([d for d, _ in agreement])
    pairs = torch.cat([p for _, p in agreement])
    return difference.double() / pairs.clamp_min(1), pairs > 0


def _agreement(scores: Tensor, labels: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return concordant minus discordant pairs, and the pairs with different labels, int64 (B,) each."""
    better = (labels[:, :, None] > labels[:, None, :]) & valid[:, :, None] & valid[:, None, :]
    agree = (better & (scores[:, :, None] > scores[:, None, :])).sum((-2, -1))
    oppose = (better & (scores[:, :, None] < scores[:, None, :])).sum((-2, -1))
    return agree - oppose, better.sum((-2, -1))
