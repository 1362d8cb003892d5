"""LLPAUC: the lower-left partial area under the ROC curve."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.ops.selection.weighted import weighted_pair


class LLPAUCLoss(RankingLoss):
    """Squared loss of the partial AUC: the best positives against the best negatives.

    L = mean over pairs (i, j) of (1 - s_i + s_j)^2, s = sigmoid(x / tau), i in the share `max_tpr` of the positives
    with the largest scores and j in the share `max_fpr` of the negatives with the largest scores. An item at the
    boundary counts in part. With m and v the means and variances of s over the two sets, L = (1 - m_i + m_j)^2 + v_i +
    v_j. The paper maximises the same area by learning the thresholds, m_i and m_j in a minimax problem over all users;
    here they are exact for each list. A list without negatives has the loss 0.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N log N). Use it if positives are noisy: those with
    low scores do not count.

    Args:
        max_tpr: Share of the positives (alpha in the paper), in (0, 1].
        max_fpr: Share of the negatives (beta in the paper), in (0, 1]; smaller for a smaller cut-off.
        tau: Temperature of the scores.
        k: If given, only the true top k are positive.
        options: See `RankingLoss`.

    Example:
        >>> LLPAUCLoss(max_fpr=0.5)(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(1.3219)
    """

    name, label_kind, family, cost = "llpauc", "binary", "listwise", "n log n"
    takes_item_weights = True
    paper = "Shi et al. 2024, WWW, arXiv 2403.00844"

    def __init__(
        self, max_tpr: float = 0.7, max_fpr: float = 0.1, tau: float = 1.0, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        for name, share in (("max_tpr", max_tpr), ("max_fpr", max_fpr)):
            if not 0.0 < share <= 1.0:
                raise ValueError(f"{name} must be in (0, 1], got {share!r}")
        self.max_tpr, self.max_fpr = float(max_tpr), float(max_fpr)
        self.tau = check_positive("tau", tau)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        weights = mask.to(scores.dtype) if weights is None else weights
        ks = k if k is None or isinstance(k, Tensor) else torch.full_like(labels[:, 0], k)
        true = torch.where(true_items(labels, mask, ks, self.positive_above, weights), weights, 0.0)
        both = (true > 0).any(1) & (mask & (true == 0)).any(1)
        s = torch.sigmoid(scores / self.tau)
        first, spread = _moments(s, scores, true, self.max_tpr)
        second, width = _moments(s, scores, weights - true, self.max_fpr)
        return torch.where(both, (1.0 - first + second).square() + spread + width, 0.0)


def _moments(s: Tensor, scores: Tensor, weights: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return the mean and variance of s, (B,) each, over the share of the weights with the largest scores."""
    x = torch.where(weights > 0, scores.detach(), -math.inf)
    amount = share * weights.sum(1, keepdim=True)
    kept = weighted_pair(x, torch.where(amount > 0, amount, 1.0)[:, 0], weights)[0]
    larger, tied = torch.where(x > kept, weights, 0.0), torch.where(x == kept, weights, 0.0)
    part = (amount - larger.sum(1, keepdim=True)) / tied.sum(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    chosen = larger + tied * part.clamp(0.0, 1.0)
    chosen = chosen / chosen.sum(1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    mean = (chosen * s).sum(1)
    return mean, (chosen * (s - mean[:, None]).square()).sum(1)
