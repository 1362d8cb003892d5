"""ICC with the published cut-offs and pairs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from recsys_topk.cascades.objectives.base import ObjectiveOutput, Quotas
from recsys_topk.cascades.objectives.icc import ICCObjective
from recsys_topk.numerics import mean_of_lists


class PublishedICC(ICCObjective):
    """`ICCObjective` as published, with the same arguments.

    Differences from `ICCObjective`: the last stage uses the quota of the stage before it; in pairs with equal labels
    the later item is the target; the sum over pairs i < j is divided by N^2.
    """

    def compute(
        self, scores: Sequence[Tensor], labels: Tensor, mask: Tensor, groups: Tensor | None, quotas: Quotas, k: int
    ) -> ObjectiveOutput:
        """See `CascadeObjective.compute`."""
        cuts = list(quotas)
        if len(cuts) > 1:
            cuts[-1] = cuts[-2]
        return super().compute(scores, labels, mask, groups, cuts, k)

    def pairs(self, combined: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        """Return the pairwise loss of the combined scores, including padding."""
        n = labels.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=labels.device).triu(1)
        target = (labels[:, :, None] > labels[:, None, :]).to(labels.dtype)
        pairs = F.binary_cross_entropy_with_logits(
            combined[:, :, None] - combined[:, None, :], target, reduction="none"
        )
        return mean_of_lists(torch.where(later, pairs, 0.0).mean((1, 2)))
