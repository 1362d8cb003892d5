"""RankFlow: each stage is trained on the items that the previous stage passes on, and distilled from the next stage."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Quotas,
)
from recsys_topk.cascades.objectives.bce import list_bce
from recsys_topk.losses.base import RankingLoss
from recsys_topk.metrics.functional import top
from recsys_topk.numerics import masked_mean, weighted_mean

# Differences are clamped to this value, so that their squares, summed over a batch, fit into float32.
MAX_DIFFERENCE = 1e15


class RankFlowObjective(CascadeObjective):
    """BCE of each stage on the items that reach it, and distillation from the next stage on the items it passes on.

    With T_m the quota_m best items of T_(m-1) by stage m (T_(-1) = the whole list) and sg the stop-gradient:
    total = sum_m BCE(x_m on T_(m-1)) + distillation * MSE(x_m, sg x_(m+1) on T_m)
    + ranking * -log sigmoid(mean of x_m over the best of T_m - mean of x_m over the others), where the best are the
    quota_(m+1) items that the next stage would keep.

    Args:
        loss: Its `positive_above` defines the positives.
        stages: Number of stages.
        distillation: Weight of the mean squared error.
        ranking: Weight of the ranking term; None = the published values, 0 for two stages and 1 for more.
    """

    name = "rankflow"
    uses_loss = False
    paper = "Qin et al. 2022, SIGIR, as in Wang et al. 2025, arXiv 2503.09492"

    def __init__(
        self, loss: RankingLoss, stages: int, *, distillation: float = 1.0, ranking: float | None = None
    ) -> None:
        super().__init__(loss, stages)
        self.distillation = distillation
        self.ranking = (0.0 if stages <= 2 else 1.0) if ranking is None else ranking

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        positive = mask & (labels > self.loss.positive_above)
        counted = positive.any(-1)
        reached = mask
        terms: list[Tensor] = []
        others: dict[str, Tensor] = {}
        total = labels.new_zeros(())
        for m, x in enumerate(scores):
            terms.append(list_bce(x, positive & reached, reached))
            total = total + terms[m]
            if m + 1 == len(scores):
                break
            following = scores[m + 1].detach()
            reached = top(x, quotas[m], reached)
            distance = masked_mean((x - following).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE).square(), reached)
            others[f"distillation{m}"] = weighted_mean(distance, counted)
            total = total + self.distillation * others[f"distillation{m}"]
            if self.ranking:
                best = top(following, quotas[m + 1], reached)
                rest = reached & ~best
                margin = masked_mean(x, best) - masked_mean(x, rest)
                others[f"ranking{m}"] = weighted_mean(-F.logsigmoid(margin), counted & rest.any(-1))
                total = total + self.ranking * others[f"ranking{m}"]
        return ObjectiveOutput.of_stages(total, terms, **others)
