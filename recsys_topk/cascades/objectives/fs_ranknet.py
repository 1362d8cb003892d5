"""Full-stage RankNet: every stage learns the order of the sample groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Quotas,
    TermWeights,
    Weighting,
    require_groups,
)
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.pairs import LabelOrder, pairwise_logistic
from recsys_topk.numerics import weighted_mean


class FullStageRankNet(CascadeObjective):
    """Pairwise logistic loss between sample groups, for every stage.

    For each group, the mean of -log sigmoid(x_i - x_j) over pairs of an item i of the group and an item j of a lower
    group; summed over groups and stages.

    Args:
        loss: Not used.
        stages: Number of stages.
        weighting: ``"fixed"`` (1 each) or ``"learned"``.
    """

    name = "fs_ranknet"
    uses_loss = False
    compares_groups = True
    paper = "FS-LTR (Zheng et al. 2024), as in Wang et al. 2025, arXiv 2503.09492"

    def __init__(self, loss: RankingLoss, stages: int, *, weighting: Weighting = "fixed") -> None:
        super().__init__(loss, stages)
        self.weights = TermWeights(stages, weighting)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        group = require_groups(groups, self.name)
        # Pairs are counted by sorting, so that the number of groups is not read on the host. Padding comes first.
        padded_group = torch.where(mask, group, group.amin() - 1).contiguous()
        ordered = padded_group.sort(-1).values
        after = torch.searchsorted(ordered, padded_group, right=True)
        pairs = (after - torch.searchsorted(ordered, padded_group)) * (padded_group.shape[1] - after)
        weights = torch.where(mask & (pairs > 0), 1.0 / pairs.clamp_min(1).to(labels.dtype), 0.0)
        values = (group.amax() - group).to(labels.dtype)
        order = LabelOrder(values, mask)
        first, ones = weights.gather(1, order.rows), order.blocks(values, "ones")
        counted = order.count() > 0

        def weight(span: slice) -> Tensor:
            return ones(span).mul_(first[span, :, None])

        terms = [weighted_mean(pairwise_logistic(x, order.rows, weight), counted) for x in scores]
        return ObjectiveOutput.of_stages(self.weights(terms), terms)
