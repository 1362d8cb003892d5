"""The k-th and (k+1)-th largest valid score of each list."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kth_pair(scores: Tensor, k: int | Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_[k], x_[k+1]) of each list, each (B, 1), differentiable.

    Args:
        scores: (B, N).
        k: One int, or an int64 tensor (B,), with 1 <= k < number of valid items.
        mask: Boolean (B, N).
    """
    index = k[:, None] if isinstance(k, Tensor) else torch.full((scores.shape[0], 1), k, device=scores.device)
    ordered = torch.where(mask, scores, -math.inf).sort(-1, descending=True).values
    return ordered.gather(1, index - 1), ordered.gather(1, index)
