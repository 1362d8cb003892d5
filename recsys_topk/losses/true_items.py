"""The true items of a list: the positive ones, or those of them in the true top k."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.numerics import is_full
from recsys_topk.ops.losses.topk_target import topk_target
from recsys_topk.ops.selection.weighted import weighted_pair


def true_items(
    labels: Tensor, mask: Tensor, k: int | Tensor | None, positive_above: float, weights: Tensor | None = None
) -> Tensor:
    """Return the valid items with a label above `positive_above`, boolean (B, N); with k, only those in the true top k.

    With weights, (B, N), 0 where masked, the true top k are the items up to the label at which the cumulated weight of
    the positives reaches k, labels tied with it included.

    Example:
        >>> true_items(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2, 0.0)
        tensor([[ True, False, False,  True]])
    """
    if k is None or weights is not None:
        positive = labels > positive_above if is_full(mask) else mask & (labels > positive_above)
        return positive if k is None else _best(labels, positive, k, weights)
    true = topk_target(labels, mask, k, positive_above) > 0
    if isinstance(k, Tensor):
        return true & (k > 0)[:, None]
    return true if k > 0 else torch.zeros_like(true)


def _best(labels: Tensor, positive: Tensor, k: int | Tensor, weights: Tensor | None) -> Tensor:
    assert weights is not None
    assert isinstance(k, Tensor)
    summed = torch.where(positive, weights, 0.0)
    crowded = (k > 0) & (k < summed.sum(1))
    ks = torch.where(crowded, k, 0.5 * summed.sum(1))
    boundary = weighted_pair(torch.where(positive, labels, -math.inf), ks, summed)[0]
    return positive & (~crowded[:, None] | (labels >= boundary)) & (k > 0)[:, None]
