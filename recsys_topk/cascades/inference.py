"""Hard inference: the items that survive each stage, and their final ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recsys_topk.metrics.functional import survivors
from recsys_topk.ops.selection.ranks import descending_order


@dataclass(frozen=True)
class CascadeResult:
    """The result of a cascade.

    Attributes:
        passed: Boolean (S, B, N), the items that each stage passes on.
        rank: int64 (B, N), 1-based rank among the survivors by the score of the last stage; 0 for all other items.
    """

    passed: Tensor
    rank: Tensor

    @property
    def kept(self) -> Tensor:
        """Boolean (B, N), the items that survive all stages."""
        return self.passed[-1]


def apply_quotas(scores: Sequence[Tensor], mask: Tensor, quotas: Sequence[int]) -> CascadeResult:
    """Apply the quotas stage by stage. Among equal scores the first item is kept.

    Args:
        scores: One (B, N) tensor per stage.
        mask: Boolean (B, N), True = a real candidate.
        quotas: Number of items that each stage passes on.

    Example:
        >>> first, last = torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> apply_quotas([first, last], torch.ones(1, 4, dtype=torch.bool), [3, 2]).rank
        tensor([[0, 2, 1, 0]])
    """
    passed = survivors(scores, mask, quotas=quotas)
    order = descending_order(scores[-1], passed[-1])
    places = torch.arange(1, order.shape[1] + 1, device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, places)
    return CascadeResult(passed, torch.where(passed[-1], rank, 0))
