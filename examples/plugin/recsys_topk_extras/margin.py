"""A hinge loss: every positive should exceed the hardest negative by a margin."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.losses.base import LossOptions, RankingLoss


class MarginLoss(RankingLoss):
    """Mean over positives of max(0, margin - (x_i - logsumexp of the negatives)): linear in N, no sort.

    Args:
        margin: Required difference between a positive and the log-sum-exp of the negatives.
        options: See `RankingLoss`.
    """

    name, label_kind, family, cost = "margin", "binary", "listwise", "n"
    paper = "an example"

    def __init__(self, margin: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.margin = margin

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        positive = mask & (labels > self.positive_above)
        negative = mask & ~positive
        some = negative.any(-1, keepdim=True)
        rival = torch.logsumexp(torch.where(negative, scores, torch.where(some, -math.inf, 0.0)), -1, keepdim=True)
        short = torch.where(some, (self.margin - (scores - rival)).clamp_min(0.0), 0.0)
        return (short * positive).sum(-1) / positive.sum(-1).clamp_min(1)
