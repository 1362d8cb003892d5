"""SoftmaxLoss@K: softmax cross-entropy weighted by whether an item is in the top k."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.softmax import item_losses
from recsys_topk.losses.true_items import true_items
from recsys_topk.ops.selection.weighted import kth_score


class SoftmaxAtKLoss(RankingLoss):
    """SL@K: the softmax loss of each positive, weighted by its soft membership of the top k.

    L = mean over positives i of s((x_i - beta) / tau_weight) log sum_j exp((x_j - x_i) / tau), with s the logistic
    function and beta = x_[k], the k-th largest score. L bounds -log NDCG@k up to constants. Beta and the weight are
    constants for the gradient, so the gradient raises every positive.

    The paper differentiates the weight, but not beta (`weight_gradient`). Lowering x_i then lowers its weight. This
    effect dominates where log sum_j exp((x_j - x_i) / tau) (1 - s) / tau_weight > (1 - softmax_i) / tau. With
    tau_weight = tau this holds for every positive of an untrained model with more than a few items, so the gradient
    *lowers* the positives. Use `weight_gradient` only after training with `softmax`, or with tau_weight well above
    tau log N; docs/losses.md has figures.

    Shapes: scores, labels and mask (B, N). Labels: binary. Cost: O(N). Use it for NDCG@k with sampled negatives. A
    positive far below beta has almost no weight.

    Args:
        tau: Temperature of the softmax.
        tau_weight: Temperature of the weight.
        weight_gradient: Differentiate the weight, as the paper does.
        k: Rank of the threshold beta; required here or in the call.
        options: See `RankingLoss`.

    Example:
        >>> SoftmaxAtKLoss(k=2)(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.7038)
    """

    name, label_kind, family, cost = "softmax_at_k", "binary", "listwise", "n"
    requires_k = True
    exact_gradient = False  # the quantile and the weight are held constant
    takes_item_weights = True
    paper = "Yang et al. 2025, KDD, arXiv 2508.05673"

    def __init__(
        self, tau: float = 1.0, tau_weight: float = 1.0, weight_gradient: bool = False, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(**options)
        self.tau = check_positive("tau", tau)
        self.tau_weight = check_positive("tau_weight", tau_weight)
        self.weight_gradient = weight_gradient

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        assert k is not None
        positive = true_items(labels, mask, None, self.positive_above)
        target = positive.to(scores.dtype) if weights is None else torch.where(positive, weights, 0.0)
        reached = scores if self.weight_gradient else scores.detach()
        weight = torch.sigmoid((reached - kth_score(scores, k, mask, weights)) / self.tau_weight) * target
        x = scores if self.tau == 1.0 else scores / self.tau
        return (item_losses(x, mask, weights) * weight).sum(-1) / target.sum(-1)
