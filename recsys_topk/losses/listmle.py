"""ListMLE: the likelihood of the labels' order under the Plackett-Luce model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.true_items import true_items
from recsys_topk.ops.losses.plackett_luce import plackett_luce


class ListMLELoss(RankingLoss):
    """Negative log-likelihood of the order of the labels under the Plackett-Luce model of the scores.

    L = sum over items i of log sum_{j: y_j <= y_i} exp(x_j) - x_i: each item is compared with all items whose label is
    not larger. Items with the lowest label of their list are not terms of the sum. With distinct labels this is the
    ListMLE of the paper. For tied labels it is Breslow's form of the likelihood, which does not depend on the order of
    the items (most implementations order tied labels by position or at random). With k, only the true top k are terms
    of the sum (top-k ListMLE, Xia et al. 2009).

    Shapes: scores, labels and mask (B, N). Labels: graded, only their order matters. Cost: O(N log N). Use it when the
    full order is known and few labels are tied. Long lists give large values, because terms are summed.

    Args:
        k: If given, only the order of the true top k counts.
        options: See `RankingLoss`.

    Example:
        >>> ListMLELoss()(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]]))
        tensor(3.5345)
    """

    name, label_kind, family, cost = "listmle", "graded", "listwise", "n log n"
    takes_item_weights = True
    paper = "Xia et al. 2008, ICML; top k: Xia et al. 2009, NeurIPS"

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`."""
        terms = mask & (labels > torch.where(mask, labels, math.inf).amin(-1, keepdim=True))
        if k is not None:
            terms = terms & true_items(labels, mask, k, self.positive_above, weights)
        return plackett_luce(scores, labels, terms, mask, weights)
