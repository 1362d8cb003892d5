"""Smooth top-k SVM: the multi-class hinge loss at k, with a smooth maximum over all subsets of k items."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus
from typing_extensions import Unpack

from recsys_topk.checks import check_not_negative, check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.numerics import masked_mean
from recsys_topk.ops.selection.subsets import subset_logs


class SmoothTopKSVMLoss(RankingLoss):
    """Hinge loss with a margin between the best k-subset with the positive item and the best k-subset without it.

    For a positive item t, with the maximum over subsets A of k items smoothed by tau:
    l_t = smooth max_A (margin [t not in A] + mean score of A) - smooth max_{A with t} (mean score of A).
    With p_t the membership of `smooth_topk` at temperature k tau this is
    l_t = tau softplus((margin / tau) + log(1 - p_t) - log p_t), and L is the mean over the true top k. With one
    positive per list it is the loss of the paper; as tau goes to 0 it becomes the top-k hinge loss.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(k N) time and memory.

    Args:
        tau: Temperature.
        margin: Required score difference between subsets with and without the positive item (alpha in the paper).
        k: How many items to select; required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> SmoothTopKSVMLoss(k=2)(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0, 0.0]]))
        tensor(1.5886)
    """

    name, label_kind, family, cost = "smooth_topk_svm", "binary", "top-k", "k n"
    requires_k = True
    paper = "Berrada et al. 2018, arXiv 1802.07595"

    def __init__(self, tau: float = 1.0, margin: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(**options)
        self.tau = check_positive("tau", tau)
        self.margin = check_not_negative("margin", margin)

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        assert k is not None
        size = k[:, None] if isinstance(k, Tensor) else k
        log_p, log_q = subset_logs(scores / (self.tau * size), k, mask)
        true = true_items(labels, mask, k, self.positive_above)
        gap = (log_q - log_p).masked_fill(~true, 0.0)
        return masked_mean(self.tau * softplus(self.margin / self.tau + gap), true)
