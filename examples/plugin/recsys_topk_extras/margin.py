"""A hinge loss: every positive should exceed the hardest negative by a margin."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.losses import RankingLoss
from recsys_topk.losses.base import Reduction


class MarginLoss(RankingLoss):
    """Mean over positives of max(0, margin - (x_i - logsumexp of the negatives)): linear in N, no sort.

    Args:
        margin: Required difference between a positive and the log-sum-exp of the negatives.
        positive_above: Items with a label above this are positive.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on NaN or infinity among valid scores.
    """

    name, family, cost = "margin", "listwise", "n"
    label_kind = "binary"
    paper = "an example"

    def __init__(
        self, margin: float = 1.0, *, positive_above: float = 0.0, reduction: Reduction = "mean", validate: bool = False
    ) -> None:
        super().__init__(positive_above=positive_above, reduction=reduction, validate=validate)
        self.margin = margin

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        positive = mask & (labels > self.positive_above)
        negative = mask & ~positive
        some = negative.any(-1, keepdim=True)
        rival = torch.logsumexp(torch.where(negative, scores, torch.where(some, -math.inf, 0.0)), -1, keepdim=True)
        short = torch.where(some, (self.margin - (scores - rival)).clamp_min(0.0), 0.0)
        return (short * positive).sum(-1) / positive.sum(-1).clamp_min(1)
