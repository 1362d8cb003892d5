"""ICC: one score for the whole cascade, made of each stage's score where the item would leave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.objectives.base import CascadeObjective, ObjectiveOutput
from recsys_topk.checks import check_positive
from recsys_topk.losses.base import RankingLoss
from recsys_topk.losses.ranknet import RankNetLoss
from recsys_topk.ops.kth_pair import kth_pair


class ICCObjective(CascadeObjective):
    """RankNet on score_i = sum_m f^m (prod_{j<m} I_j) (1 - I_m) x_m, the last stage with I_m in place of 1 - I_m.

    I_m = sigmoid((x_m - kappa_m) / sigma) says whether stage m passes the item on, kappa_m = x_m,[cut] is the score of
    the last item that it passes (differentiated), and f raises the scores of items that come further.

    Args:
        loss: Its `positive_above` says which lists count.
        stages: Number of stages.
        sigma: Temperature of the indicator.
        factor: f; None = the published 1 for two stages and 2 for more.
        reference_quirks: As published: the last stage cuts at the quota of the one before it, pairs with equal labels
            are trained towards "the later is better", and the sum over pairs i < j is divided by N^2.
    """

    name: ClassVar[str] = "icc"
    uses_loss: ClassVar[bool] = False
    paper: ClassVar[str] = "Gallagher et al. 2019, WSDM, as in Wang et al. 2025, arXiv 2503.09492"

    def __init__(
        self,
        loss: RankingLoss,
        stages: int,
        *,
        sigma: float = 1e-3,
        factor: float | None = None,
        reference_quirks: bool = False,
    ) -> None:
        super().__init__(loss, stages)
        self.sigma = check_positive("sigma", sigma)
        self.factor = (1.0 if stages <= 2 else 2.0) if factor is None else check_positive("factor", factor)
        self.reference_quirks = reference_quirks

    def compute(
        self,
        scores: Sequence[Tensor],
        labels: Tensor,
        mask: Tensor,
        groups: Tensor | None,
        quotas: Sequence[int],
        k: int,
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        cuts = list(quotas)
        if self.reference_quirks and len(cuts) > 1:
            cuts[-1] = cuts[-2]
        combined = torch.zeros_like(labels)
        passed = torch.ones_like(labels)
        for m, (x, cut) in enumerate(zip(scores, cuts, strict=True)):
            inside = self._passes(x, mask, cut)
            share = inside if m == self.stages - 1 else 1.0 - inside
            combined = combined + self.factor**m * passed * share * x
            passed = passed * inside
        total = self._ranknet(combined, labels, mask)
        return ObjectiveOutput(total, {"ranknet": total})

    def _passes(self, x: Tensor, mask: Tensor, cut: int) -> Tensor:
        """Return I = sigmoid((x - x_[cut]) / sigma), 1 in lists with no more than `cut` items."""
        valid = mask.sum(-1)
        proper = (valid > cut)[:, None]
        if x.shape[1] < 2:
            return torch.ones_like(x)
        place = torch.where(proper[:, 0], cut, 1)
        kappa, _ = kth_pair(torch.where(proper, x, 0.0), place, mask | ~proper)
        return torch.where(proper, torch.sigmoid((x - kappa) / self.sigma), 1.0)

    def _ranknet(self, combined: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        if not self.reference_quirks:
            ranknet = RankNetLoss(positive_above=self.loss.positive_above)
            value: Tensor = ranknet(combined, labels, mask)
            return value
        n = labels.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=labels.device).triu(1)
        target = (labels[:, :, None] > labels[:, None, :]).to(labels.dtype)
        pairs = F.binary_cross_entropy_with_logits(
            combined[:, :, None] - combined[:, None, :], target, reduction="none"
        )
        return torch.where(later, pairs, 0.0).mean()
