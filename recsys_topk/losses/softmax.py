"""Softmax cross-entropy over the items of a list (InfoNCE, sampled softmax)."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.item_weights import true_weights
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import is_full


def item_log_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return log softmax over the valid items of each list, 0 where masked, (B, N); every list has a valid item."""
    if is_full(mask):
        return F.log_softmax(scores, -1)
    return torch.where(mask, F.log_softmax(torch.where(mask, scores, -math.inf), -1), 0.0)


class SoftmaxLoss(RankingLoss):
    """Softmax cross-entropy: each positive against the rest of its list, mean over the positives.

    L = mean over positives i of -log(exp(x_i / tau) / sum_{j in C_i} exp(x_j / tau)), where C_i is the whole list
    (``against="all"``) or i and the negatives (``against="negatives"``, so that positives do not compete with each
    other).

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it for retrieval with sampled negatives. It
    bounds NDCG over the whole list. The smaller tau is, the more the gradient concentrates on the hardest negatives.

    Args:
        tau: Temperature.
        against: ``"all"`` or ``"negatives"``.
        k: If given, only the true top k are positive.
        options: See `RankingLoss`.

    Example:
        >>> SoftmaxLoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.4076)
    """

    name, label_kind, family, cost = "softmax", "binary", "listwise", "n"
    takes_item_weights = True
    paper = "Bruch et al. 2019, ICTIR; van den Oord et al. 2018, arXiv 1807.03748 (InfoNCE)"

    def __init__(
        self, tau: float = 1.0, against: Literal["all", "negatives"] = "all", **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        if against not in ("all", "negatives"):
            raise ValueError(f"against must be 'all' or 'negatives', got {against!r}")
        self.tau = check_positive("tau", tau)
        self.partition_tau = self.tau
        self.against = against

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        positive = true_items(labels, mask, k, self.positive_above)
        x = scores if self.tau == 1.0 else scores / self.tau
        if self.against == "all":
            losses = -item_log_softmax(x, mask)
        else:
            # -log(exp(x_i) / (exp(x_i) + sum_neg exp(x_j))) = log(1 + exp(logsumexp_neg - x_i))
            negative = mask & ~positive
            some = negative.any(-1, keepdim=True)
            rivals = torch.logsumexp(torch.where(negative, x, torch.where(some, -math.inf, x)), -1, keepdim=True)
            losses = torch.where(some, -F.logsigmoid(x - rivals), 0.0)
        return (losses * positive).sum(-1) / positive.sum(-1).clamp_min(1)

    def per_list_weighted(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """See `RankingLoss.per_list_weighted`."""
        true = true_weights(labels, mask, k, self.positive_above, weights)
        x = scores / self.tau
        rivals = mask if self.against == "all" else mask & (true == 0)
        some = rivals.any(1, keepdim=True)
        logs = torch.where(rivals, x + weights.log(), torch.where(some, -math.inf, 0.0))
        partition = torch.logsumexp(logs, 1, keepdim=True)
        losses = partition - x if self.against == "all" else torch.where(some, -F.logsigmoid(x - partition), 0.0)
        return (torch.where(true > 0, losses, 0.0) * true).sum(1) / true.sum(1).clamp_min(torch.finfo(x.dtype).tiny)
