"""Binary cross-entropy of each stage on the items that reach it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
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
from recsys_topk.numerics import masked_mean, weighted_mean
from recsys_topk.processes import largest


def list_bce(scores: Tensor, positive: Tensor, mask: Tensor) -> Tensor:
    """Return the mean binary cross-entropy over the items in `mask`, averaged over the lists with a positive."""
    terms = F.binary_cross_entropy_with_logits(scores, positive.to(scores.dtype), reduction="none")
    return weighted_mean(masked_mean(terms, mask), positive.any(-1) & mask.any(-1))


class BCEObjective(CascadeObjective):
    """Binary cross-entropy of each stage: positives against the other items of the groups that reach the stage.

    The first stage gets all groups, the last stage the two best groups, and a stage in between one group less for each
    stage before it (two stages over four groups: 4, 2; three stages over five groups: 5, 4, 2). Sampled negatives reach
    the first stage only.

    Args:
        loss: Its `positive_above` defines the positives.
        stages: Number of stages.
        visible: Number of groups that reach each stage; None = as above.
        weighting: ``"fixed"`` (1 each) or ``"learned"``.
    """

    name = "bce"
    uses_loss = False
    paper = "baseline of Wang et al. 2025, arXiv 2503.09492"

    def __init__(
        self, loss: RankingLoss, stages: int, *, visible: Sequence[int] | None = None, weighting: Weighting = "fixed"
    ) -> None:
        super().__init__(loss, stages)
        if visible is not None and len(visible) != stages:
            raise ValueError(
                f"visible must have one number of groups per stage, got {list(visible)} for {stages} stages"
            )
        self.visible = None if visible is None else list(visible)
        self.weights = TermWeights(stages, weighting)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        group = require_groups(groups, self.name)
        positive = mask & (labels > self.loss.positive_above)
        terms = []
        for m, x in enumerate(scores):
            visible = mask
            if m > 0 or self.visible is not None:
                visible = mask & (group < self._visible(m, group, labels))
            terms.append(list_bce(x, positive & visible, visible))
        return ObjectiveOutput.of_stages(self.weights(terms), terms)

    def _visible(self, stage: int, group: Tensor, labels: Tensor) -> Tensor | int:
        if self.visible is not None:
            return self.visible[stage]
        if stage == self.stages - 1:
            return 2
        # Sampled negatives have label 0 and form the last group.
        return largest(group.masked_fill(labels <= 0, -1).amax()) + 1 - stage
