"""LambdaLoss: NDCG-Loss1, NDCG-Loss2 and NDCG-Loss2++, also at k."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from recsys_topk.checks import check_positive
from recsys_topk.losses.base import LossOptions, RankingLoss
from recsys_topk.losses.pairs import LabelOrder, check_pairs, weighted_pairs
from recsys_topk.ops.losses.dcg import Gain, LogBase, check_gain, discount, normalised_gains
from recsys_topk.ops.losses.pair_spans import better_items
from recsys_topk.ops.losses.pair_sums import PairWeights
from recsys_topk.ops.selection.ranks import weighted_ranks

Variant = Literal["ndcg1", "ndcg2", "ndcg2pp"]


class LambdaLoss(RankingLoss):
    """Bounds of NDCG from the LambdaLoss framework: pairwise logistic losses with weights from gains and ranks.

    L = sum over pairs of w_ij log_b(1 + exp(-sigma (x_i - x_j))), with G = gain / ideal DCG@k, D(r) = 1 / log2(1 + r),
    r the rank by score, and no gradient through w:

    - ``ndcg1``: w_ij = G_i D(r_i), over all ordered pairs of valid items, including i = j (the 1 in a rank);
    - ``ndcg2``: w_ij = (G_i - G_j) (D(d) - D(d + 1)), d = abs(r_i - r_j), over pairs with y_i > y_j;
    - ``ndcg2pp``: mu times the weight of ``ndcg2`` plus LambdaRank's (G_i - G_j) abs(D(r_i) - D(r_j)).

    With k, the ideal DCG and LambdaRank's D are cut at k, ``ndcg1`` uses only items i ranked in the first k, and
    ``ndcg2`` divides the weight of pairs with a rank beyond k by 1 - D(max(r_i, r_j)) (Jagerman et al. 2022).

    Shapes: scores, labels and mask (B, N). Labels: graded. Cost: O(p N) time for p items that have a larger label than
    some other item, O(N) memory per list beyond a buffer of fixed size. Use it when NDCG@k is the goal; ``ndcg2pp`` is
    the best variant in the paper.

    Args:
        variant: ``"ndcg1"``, ``"ndcg2"`` or ``"ndcg2pp"``.
        sigma: Steepness of the logistic function.
        mu: Weight of the ``ndcg2`` part in ``ndcg2pp``.
        gain: ``"exponential"``, 2^y - 1, or ``"linear"``, y. None = by the kind of labels: exponential for grades
            (the default), linear for places (such as RecFlow's 29..20).
        log_base: Base of the loss's logarithm: ``"2"`` (the paper) or ``"e"``.
        pairs: ``"sum"`` over the pairs of a list, or their ``"mean"``.
        k: Cut-off of NDCG@k; None = no cut-off.
        options: See `RankingLoss`.

    Example:
        >>> LambdaLoss("ndcg2")(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        tensor(0.8661)
    """

    name, label_kind, family, cost = "lambdaloss", "graded", "pairwise", "n^2"
    takes_item_weights = True
    paper = "Wang et al. 2018, CIKM; at k: Jagerman et al. 2022, SIGIR"

    def __init__(
        self,
        variant: Variant = "ndcg2pp",
        sigma: float = 1.0,
        mu: float = 10.0,
        gain: Gain | None = None,
        log_base: LogBase = "2",
        pairs: Literal["sum", "mean"] = "sum",
        **options: Unpack[LossOptions],
    ) -> None:
        super().__init__(**options)
        if variant not in ("ndcg1", "ndcg2", "ndcg2pp"):
            raise ValueError(f"variant must be 'ndcg1', 'ndcg2' or 'ndcg2pp', got {variant!r}")
        if log_base not in ("2", "e"):
            raise ValueError(f"log_base must be '2' or 'e', got {log_base!r}")
        self.variant: Variant = variant
        self.sigma = check_positive("sigma", sigma)
        self.mu = check_positive("mu", mu)
        given = None if gain is None else check_gain(gain)
        self.gain: Gain = self._by_labels("gain", given, grades="exponential", places="linear")
        self.log_base = log_base
        self.pairs = check_pairs(pairs)

    def per_list(
        self, scores: Tensor, labels: Tensor, mask: Tensor, k: int | Tensor | None, weights: Tensor | None = None
    ) -> Tensor:
        """See `RankingLoss.per_list` and `per_list_weighted`. Ranks and the ideal DCG count weights."""
        gains = normalised_gains(labels, self.gain, mask, k, weights)
        ranks = weighted_ranks(scores, labels, mask, weights)
        if self.variant == "ndcg1":
            first = gains * discount(ranks, ranks.dtype, k=k)
            second = torch.where(mask, 0.0, math.inf).to(first.dtype)
            pairs = PairWeights(first, second, "rows", items=weights)
            total = weighted_pairs(scores, pairs, lambda: better_items(first > 0), sigma=self.sigma)
            if self.pairs == "mean":
                total = total / (mask if weights is None else weights).sum(-1).square()
        else:
            order = LabelOrder(labels, mask, item_weights=weights)
            both = {"discounts": discount(ranks, ranks.dtype, k=k), "mu": self.mu} if self.variant == "ndcg2pp" else {}
            pairs = order.weights(gains, "differences", ranks=ranks, k=k, **both)
            total = order.loss(scores, pairs, self.sigma, self.pairs)
        return total / math.log(2.0) if self.log_base == "2" else total
