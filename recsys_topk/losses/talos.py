"""Talos: a softmax of memberships of the top k, for precision and recall at k."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.ops.selection.weighted import kth_score


class TalosLoss(RankingLoss):
    """Softmax of the soft memberships s(x - beta) of the top k: positives above the threshold, negatives below it.

    L = mean over positives i of -log(p_i / (p_i + sum_{negatives j} p_j)), p = s(x - beta)^(1 / tau), with s the
    logistic function and beta = x_[k], the k-th largest score, a constant for the gradient. The sum over negatives
    keeps the scores from growing together. The authors leave p_i out of the sum, which makes the loss negative for good
    scores. They learn beta by quantile regression for each user; here it is the quantile of the list. A list without
    negatives has the loss 0.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it for recall@k with sampled negatives.

    Args:
        tau: Temperature of the softmax.
        k: Rank of the threshold beta; required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> TalosLoss(k=1)(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.1946)
    """

    name, label_kind, family, cost = "talos", "binary", "listwise", "n"
    requires_k = True
    exact_gradient = False  # the threshold is held constant
    takes_item_weights = True
    paper = "Zhang et al. 2026, WWW, arXiv 2601.19276"

    def __init__(self, tau: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.tau = check_positive("tau", tau)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        assert k is not None
        beta = kth_score(scores, k, mask, weights)
        weights = mask.to(scores.dtype) if weights is None else weights
        positive = true_items(labels, mask, None, self.positive_above)
        true, negative = torch.where(positive, weights, 0.0), mask & ~positive
        some = negative.any(1, keepdim=True)
        logs = F.logsigmoid(scores - beta) / self.tau
        rivals = torch.where(negative, logs + weights.log(), torch.where(some, -math.inf, 0.0))
        losses = F.softplus(torch.logsumexp(rivals, 1, keepdim=True) - logs)
        return torch.where(some & (true > 0), losses * true, 0.0).sum(1) / true.sum(1)
