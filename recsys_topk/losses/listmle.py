"""ListMLE: the likelihood of the labels' order under the Plackett-Luce model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.item_weights import true_weights
from recsys_topk.losses.true_items import true_items
from recsys_topk.ops.dispatch import under_transform
from recsys_topk.ops.losses.known_gradient import known_gradient
from recsys_topk.ops.selection.ranks import descending_order, tie_groups


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

    def per_list(self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None) -> Tensor:
        """See `RankingLoss.per_list`."""
        terms = mask & (labels > torch.where(mask, labels, math.inf).amin(-1, keepdim=True))
        if k is not None:
            terms = terms & true_items(labels, mask, k, self.positive_above)
        order = descending_order(labels, mask)
        ordered, chosen = labels.gather(1, order), terms.gather(1, order)

        def formula(x: Tensor) -> Tensor:
            # Masked scores are very low instead of -inf, because logcumsumexp has no derivative at -inf.
            low = torch.finfo(x.dtype).min / 4
            return _plackett_luce(torch.where(mask, x, low).gather(1, order), ordered, chosen)[0]

        if under_transform():
            return formula(scores)
        x = torch.where(mask, scores.detach(), -math.inf).gather(1, order)
        value, gradient = _plackett_luce(x, ordered, chosen)
        return known_gradient(scores, value, torch.zeros_like(gradient).scatter_(1, order, gradient), formula)

    def per_list_weighted(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: Tensor | None, weights: Tensor
    ) -> Tensor:
        """See `RankingLoss.per_list_weighted`."""
        terms = mask & (labels > torch.where(mask, labels, math.inf).amin(-1, keepdim=True))
        if k is not None:
            terms = terms & (true_weights(labels, mask, k, self.positive_above, weights) > 0)
        order = descending_order(labels, mask)
        low = torch.finfo(scores.dtype).min / 4  # not -inf, at which logcumsumexp has no derivative
        x = torch.where(mask, scores + weights.log(), low).gather(1, order)
        first, _ = tie_groups(labels.gather(1, order)[:, 1:] != labels.gather(1, order)[:, :-1])
        rest = x.flip(-1).logcumsumexp(-1).flip(-1).gather(1, first)
        losses = (rest - scores.gather(1, order)) * weights.gather(1, order)
        return torch.where(terms.gather(1, order), losses, 0.0).sum(1)


def _plackett_luce(x: Tensor, labels: Tensor, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, (B,), and its gradient, (B, N), of lists sorted by descending label. Masked scores are -inf.

    With R_i the items whose label is not larger than that of i and c_i = logsumexp over R_i, L = sum of c_i - x_i over
    the terms, and dL/dx_j = sum over terms i with j in R_i of exp(x_j - c_i), minus 1 if j is a term. Both are
    cumulative sums, computed in logarithms to avoid underflow.
    """
    first, last = tie_groups(labels[:, 1:] != labels[:, :-1])
    rest = x.flip(-1).logcumsumexp(-1).flip(-1).gather(1, first)
    value = torch.where(terms, rest - x, 0.0).sum(-1)
    pressure = torch.where(terms, -rest, -math.inf).logcumsumexp(-1).gather(1, last)
    return value, torch.exp(x + pressure) - terms.to(x.dtype)
