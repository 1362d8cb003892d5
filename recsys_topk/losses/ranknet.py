"""RankNet: the logistic loss over pairs of items with different labels."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.pairs import LabelOrder, check_pairs
from recsys_topk.losses.true_items import true_items

Weighting = Literal["none", "label_difference", "squared_label_difference"]


class RankNetLoss(RankingLoss):
    """Logistic loss over the pairs of a list whose labels differ.

    L = 1/P sum over pairs with y_i > y_j of w_ij log(1 + exp(-sigma (x_i - x_j))), P the number of those pairs.

    Shapes: scores, labels and mask (B, N). Labels: graded, only their order matters unless weighted. Cost: O(p N) time
    for p items that have a larger label than some other item, O(N) memory per list beyond a buffer of fixed size. Use
    it when the whole order matters and labels are ordinal. With binary labels it is the BPR loss.

    Args:
        sigma: Steepness of the logistic function.
        weighting: w_ij = 1 (``"none"``), y_i - y_j (``"label_difference"``) or y_i^2 - y_j^2
            (``"squared_label_difference"``).
        pairs: ``"mean"`` over the pairs of a list, or their ``"sum"``, which gives long lists a larger weight.
        k: If given, only pairs whose first item is in the true top k are used.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> RankNetLoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.8133)
    """

    name, label_kind, family, cost = "ranknet", "graded", "pairwise", "n^2"
    takes_item_weights = True
    paper = "Burges et al. 2005, ICML; Rendle et al. 2009, arXiv 1205.2618 (BPR)"

    def __init__(
        self,
        sigma: float = 1.0,
        weighting: Weighting = "none",
        pairs: Literal["mean", "sum"] = "mean",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if weighting not in ("none", "label_difference", "squared_label_difference"):
            raise ValueError(
                f"weighting must be 'none', 'label_difference' or 'squared_label_difference', got {weighting!r}"
            )
        self.sigma = check_positive("sigma", sigma)
        self.weighting = weighting
        self.pairs = check_pairs(pairs)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`. A pair has the product of its items' weights."""
        candidate = None if k is None else true_items(labels, mask, k, self.positive_above, weights)
        order = LabelOrder(labels, mask, candidate, weights)
        values = labels.square() if self.weighting == "squared_label_difference" else labels
        pairs = order.weights(values, "ones" if self.weighting == "none" else "differences")
        return order.loss(scores, pairs, self.sigma, self.pairs)
