"""The true items of a list: the positive ones, or those of them in the true top k."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.ops.losses.topk_target import topk_target


def true_items(labels: Tensor, mask: Tensor, k: int | Tensor | None, positive_above: float) -> Tensor:
    """Return the valid items with a label above `positive_above`, boolean (B, N); with k, only those in the true top k.

    Example:
        >>> true_items(torch.tensor([[3.0, 0.0, 1.0, 2.0]]), torch.ones(1, 4, dtype=torch.bool), 2, 0.0)
        tensor([[ True, False, False,  True]])
    """
    if k is None:
        return mask & (labels > positive_above)
    true = topk_target(labels, mask, k, positive_above) > 0
    if isinstance(k, Tensor):
        return true & (k > 0)[:, None]
    return true if k > 0 else torch.zeros_like(true)
