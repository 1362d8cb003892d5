"""The items that truly are in the top k of their list."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.selection.fill_masked import fill_masked
from recsys_topk.ops.selection.kth_pair import kth_values


def topk_target(labels: Tensor, mask: Tensor, k: int | Tensor, positive_above: float = 0.0) -> Tensor:
    """Return which items truly are in the top k, as 0/1 in the dtype of `labels`, (B, N).

    y_i = 1 if item i is valid, positive, and its label is >= the k-th largest valid label of its list. Labels tied
    at the boundary are all in, so that the target does not depend on the order of the items.

    Example:
        >>> topk_target(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2)
        tensor([[1., 0., 0., 1.]])
    """
    positive = labels > positive_above
    return best_positives(labels, positive if is_full(mask) else positive & mask, k).to(labels.dtype)


def best_positives(labels: Tensor, positive: Tensor, k: int | Tensor) -> Tensor:
    """Return which positive items are in the top k of their list by label, ties at the boundary included, (B, N) bool.

    Args:
        labels: (B, N).
        positive: Boolean (B, N), the valid positive items.
        k: One int, or one int per list, (B,).
    """
    n = labels.shape[1]
    if not isinstance(k, Tensor):
        if k <= 0 or k >= n:
            return positive if k > 0 else torch.zeros_like(positive)
        return positive & (labels >= kth_values(fill_masked(labels, positive, -math.inf), k)[0])
    if n < 2:
        return positive & (k > 0)[:, None]
    boundary = kth_values(fill_masked(labels, positive, -math.inf), k.clamp(1, n - 1))[0]
    return positive & ((labels >= boundary) | (k >= n)[:, None]) & (k > 0)[:, None]
