"""Pointwise binary cross-entropy."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.item_weights import true_weights
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import masked_mean


class BCELoss(RankingLoss):
    """Pointwise binary cross-entropy with the scores as logits.

    L = mean over valid items of log(1 + exp(x_i)) - y_i x_i, y_i = 1 for positive items.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it when the scores must be calibrated
    probabilities; it does not depend on the order. As in every loss here, lists without a positive are skipped.

    Args:
        k: If given, only the true top k are positive.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> BCELoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.0444)
    """

    name, label_kind, family, cost = "bce", "binary", "pointwise", "n"
    takes_item_weights = True
    paper = "Cox 1958, JRSS B"

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        target = true_items(labels, mask, k, self.positive_above).to(scores.dtype)
        return masked_mean(F.binary_cross_entropy_with_logits(scores, target, reduction="none"), mask)

    def per_list_weighted(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """See `RankingLoss.per_list_weighted`."""
        target = (true_weights(labels, mask, k, self.positive_above, weights) > 0).to(scores.dtype)
        losses = F.binary_cross_entropy_with_logits(scores, target, reduction="none")
        return (losses * weights).sum(1) / weights.sum(1)
