"""Full-stage LambdaLoss: every stage optimises NDCG over all sample groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Quotas,
    TermWeights,
    Weighting,
)
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.pairs import LabelOrder, pairwise_logistic
from recsys_topk.numerics import weighted_mean
from recsys_topk.ops.losses.dcg import discount, ideal_dcg
from recsys_topk.ops.selection.ranks import tie_ranks

_Weight = Callable[[slice], Tensor]


class FullStageLambdaLoss(CascadeObjective):
    """LambdaLoss with linear gains and a natural-log discount, cut at `topn`, for each stage.

    L = 2 sum over pairs with l_i > l_j of abs(g_i - g_j) ((1 - f) u_ij + f v_ij) log(1 + exp(-(x_i - x_j))) with
    g = l / ideal DCG, D(r) = 1 / ln(1 + r), d_i = D(r_i) for r_i <= topn else 0, v_ij = abs(d_i - d_j) and
    u_ij = abs(D(r) - D(r + 1)) at r = abs(r_i - r_j) where one of the ranks is <= topn, else 0. The factor 2 comes from
    the published form, which counts every pair in both directions. No gradient flows through the weights.

    Args:
        loss: Its `positive_above` defines the counted lists.
        stages: Number of stages.
        topn: Cut-off of the discount.
        smooth_fraction: f.
        weighting: ``"fixed"`` (1 each) or ``"learned"``.
    """

    name = "fs_lambdaloss"
    uses_loss = False
    paper = "baseline of Wang et al. 2025, arXiv 2503.09492"

    def __init__(
        self,
        loss: RankingLoss,
        stages: int,
        *,
        topn: int = 30,
        smooth_fraction: float = 0.8,
        weighting: Weighting = "fixed",
    ) -> None:
        super().__init__(loss, stages)
        if not 0.0 <= smooth_fraction <= 1.0:
            raise ValueError(f"smooth_fraction must lie in [0, 1], got {smooth_fraction!r}")
        self.topn, self.smooth_fraction = topn, smooth_fraction
        self.weights = TermWeights(stages, weighting)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        counted = (mask & (labels > self.loss.positive_above)).any(-1)
        ideal = ideal_dcg(labels, base=math.e)[:, None]
        order = LabelOrder(labels, mask)
        gains = order.blocks(labels / torch.where(ideal > 0, ideal, 1.0), "differences")
        terms = [weighted_mean(2.0 * self._stage(x, labels, mask, order, gains), counted) for x in scores]
        return ObjectiveOutput.of_stages(self.weights(terms), terms)

    def _stage(self, scores: Tensor, labels: Tensor, mask: Tensor, order: LabelOrder, gains: _Weight) -> Tensor:
        ranks = tie_ranks(scores, labels, mask)
        cut = torch.where(ranks <= self.topn, discount(ranks, ranks.dtype, math.e), 0.0)
        first_rank, first_cut = ranks.gather(1, order.rows), cut.gather(1, order.rows)

        def weight(span: slice) -> Tensor:
            swap = (first_cut[span, :, None] - cut[span, None, :]).abs().mul_(self.smooth_fraction)
            if self.smooth_fraction < 1.0:
                a, b = first_rank[span, :, None], ranks[span, None, :]
                # Different items are at least half a rank apart; the gain difference of an item with itself is 0.
                distance = (a - b).abs().clamp_min(0.5)
                near = discount(distance, a.dtype, math.e) - discount(distance + 1.0, a.dtype, math.e)
                swap += torch.where(torch.minimum(a, b) <= self.topn, near * (1.0 - self.smooth_fraction), 0.0)
            return swap.mul_(gains(span))

        return pairwise_logistic(scores, order.rows, weight)
