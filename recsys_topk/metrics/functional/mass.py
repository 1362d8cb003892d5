"""Total membership of a soft selection relative to k."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.checks import check_count, check_lists
from recsys_topk.numerics import full_mask


def selection_mass(p: Tensor, mask: Tensor | None = None, *, k: int) -> tuple[Tensor, Tensor]:
    """Return sum(p) / k, the total membership of a soft selection relative to k, per list.

    The value is 1 for an operator whose membership sums to k. For DFTopK it tends to N / (2 k) as tau grows. A value
    far above 1 means that tau is large for the scale of the scores. Lists with k > 0 and a valid item are counted.

    Args:
        p: Membership, (B, N), e.g. `SoftSelection.p`.
        mask: (B, N).
        k: Number of items to select; capped at the number of valid items of the list.

    Example:
        >>> selection_mass(torch.tensor([[0.9, 0.8, 0.4, 0.1]]), k=2)[0]
        tensor([1.1000], dtype=torch.float64)
    """
    check_lists(p, mask)
    valid = full_mask(p) if mask is None else mask
    wanted = valid.sum(-1).clamp_max(check_count("k", k))
    mass = torch.where(valid, p.detach().double(), 0.0).sum(-1)
    return torch.where(wanted > 0, mass / wanted.clamp_min(1), 0.0), wanted > 0
