"""Recall as in the published research code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recsys_topk.metrics.functional import survivors, top
from recsys_topk.metrics.ranked import JointRecall, RecallAt


def published_recall(
    selected: Tensor, labels: Tensor, mask: Tensor | None, k: int, positive_above: float
) -> tuple[Tensor, Tensor]:
    """Return the published recall of one batch, the mean over all lists of hits / k, (1,), and a True flag, (1,)."""
    true = labels > positive_above if mask is None else (labels > positive_above) & mask
    true = top(torch.where(true, labels, -1.0).to(torch.float32), k) & true
    batch_mean = (true & selected).sum(-1).double().div(k).mean()[None]
    return batch_mean, torch.ones_like(batch_mean, dtype=torch.bool)


class PublishedRecall(RecallAt):
    """`RecallAt` as published, with the same arguments.

    Differences from `RecallAt`: hits are always divided by k; padding is ranked; lists without positives count as 0;
    ties are ordered by position; the result is a mean of batch means, so it depends on the batch size.

    Example:
        >>> metric = PublishedRecall(k=2, m=1)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*published_recall(top(scores, self.m), labels, mask, self.k or 0, self.positive_above))


class PublishedJointRecall(JointRecall):
    """`JointRecall` as published, with the same arguments. See `PublishedRecall`."""

    def update(self, stage_scores: Sequence[Tensor], labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: one (B, N) tensor of scores per stage, labels and mask (B, N)."""
        final = survivors(stage_scores, quotas=self.quotas)[-1]
        self.add(*published_recall(final, labels, mask, self.k or 0, self.positive_above))
