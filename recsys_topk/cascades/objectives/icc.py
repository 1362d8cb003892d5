"""ICC: one combined score for the whole cascade, from the score of the stage at which an item leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.cascades.objectives.base import (
    CascadeObjective,
    ObjectiveOutput,
    Quotas,
)
from recsys_topk.checks import check_positive
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.ranknet import RankNetLoss
from recsys_topk.ops.selection.kth_pair import kth_pair


class ICCObjective(CascadeObjective):
    """RankNet on a combined score of all stages.

    score_i = sum_m f^m (prod_{j<m} I_j) (1 - I_m) x_m, with I_m instead of 1 - I_m for the last stage.
    I_m = sigmoid((x_m - kappa_m) / sigma) indicates whether stage m passes the item on, kappa_m = x_m,[cut] is the
    score of the last item that it passes on (differentiated), and f raises the scores of items that reach later stages.

    Args:
        loss: Its `positive_above` defines the counted lists.
        stages: Number of stages.
        sigma: Temperature of the indicator.
        factor: f; None = the published values, 1 for two stages and 2 for more.
    """

    name = "icc"
    uses_loss = False
    paper = "Gallagher et al. 2019, WSDM, as in Wang et al. 2025, arXiv 2503.09492"

    def __init__(self, loss: RankingLoss, stages: int, *, sigma: float = 1e-3, factor: float | None = None) -> None:
        super().__init__(loss, stages)
        self.sigma = check_positive("sigma", sigma)
        self.factor = (1.0 if stages <= 2 else 2.0) if factor is None else check_positive("factor", factor)

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        combined = torch.zeros_like(labels)
        passed = torch.ones_like(labels)
        for m, (x, cut) in enumerate(zip(scores, quotas, strict=True)):
            inside = self._passes(x, mask, cut)
            share = inside if m == self.stages - 1 else 1.0 - inside
            combined = combined + self.factor**m * passed * share * x
            passed = passed * inside
        total = self.pairs(combined, labels, mask)
        return ObjectiveOutput(total, {"ranknet": total})

    def _passes(self, x: Tensor, mask: Tensor, cut: int) -> Tensor:
        """Return I = sigmoid((x - x_[cut]) / sigma), or 1 in lists with at most `cut` items."""
        valid = mask.sum(-1)
        longer = (valid > cut)[:, None]
        if x.shape[1] < 2:
            return torch.ones_like(x)
        rank = torch.where(longer[:, 0], cut, 1)
        kappa, _ = kth_pair(torch.where(longer, x, 0.0), rank, mask | ~longer)
        return torch.where(longer, torch.sigmoid((x - kappa) / self.sigma), 1.0)

    def pairs(self, combined: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Return the pairwise loss of the combined scores."""
        ranknet = RankNetLoss(positive_above=self.loss.positive_above)
        value: Tensor = ranknet(combined, labels, mask)
        return value
