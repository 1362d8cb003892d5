"""LambdaRank: pairs weighted by the change of NDCG when they are swapped."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.pairs import LabelOrder, check_pairs
from recsys_topk.ops.losses.dcg import Gain, check_gain, discount, normalised_gains
from recsys_topk.ops.selection.ranks import weighted_ranks


class LambdaRankLoss(RankingLoss):
    """Pairwise logistic loss, each pair weighted by the change of NDCG@k if the two items swapped places.

    L = sum over pairs with y_i > y_j of abs(G_i - G_j) abs(D(r_i) - D(r_j)) log(1 + exp(-sigma (x_i - x_j))), with
    G = gain / ideal DCG@k, D(r) = 1 / log2(1 + r) (0 beyond k), r the rank by score. No gradient flows through the
    weights. A pair has a weight only if at least one of its items is ranked in the first k, because only such a swap
    changes NDCG@k.

    Shapes: scores, labels and mask (B, N). Labels: graded. Cost: O(p N) time for p items that have a larger label than
    some other item, O(N) memory per list beyond a buffer of fixed size. Use it when NDCG@k is the goal and labels are
    grades.

    Args:
        sigma: Steepness of the logistic function.
        gain: ``"exponential"``, 2^y - 1, or ``"linear"``, y. None = by the kind of labels: exponential for grades
            (the default), linear for places (such as RecFlow's 29..20).
        pairs: ``"sum"`` over the pairs of a list, or their ``"mean"``.
        k: Cut-off of NDCG@k; None = no cut-off.
        options: See `RankingLoss`.

    Example:
        >>> import torch
        >>> LambdaRankLoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.5257)
    """

    name, label_kind, family, cost = "lambdarank", "graded", "pairwise", "n^2"
    takes_item_weights = True
    paper = "Burges 2010, MSR-TR-2010-82"

    def __init__(
        self,
        sigma: float = 1.0,
        gain: Gain | None = None,
        pairs: Literal["sum", "mean"] = "sum",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        self.sigma = check_positive("sigma", sigma)
        given = None if gain is None else check_gain(gain)
        self.gain: Gain = self._by_labels("gain", given, grades="exponential", places="linear")
        self.pairs = check_pairs(pairs)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`. Ranks and the ideal DCG count weights."""
        order = LabelOrder(labels, mask, item_weights=weights)
        gains = normalised_gains(labels, self.gain, mask, k, weights)
        discounts = discount(weighted_ranks(scores, labels, mask, weights), scores.dtype, k=k)
        return order.loss(scores, order.weights(gains, "differences", discounts=discounts), self.sigma, self.pairs)
