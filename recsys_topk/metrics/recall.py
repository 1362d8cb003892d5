"""Recall of the true top k among a model's m best items."""

from __future__ import annotations

import torch
from torch import Tensor

from recsys_topk.metrics.functional import recall_at, top
from recsys_topk.metrics.mean import ListMean


class RecallAt(ListMean):
    """recall@k@m: of the true top k of a list, the share among the m items with the best scores; mean over lists.

    See `recsys_topk.metrics.functional.recall_at` for the definition and its ties.

    Args:
        k: Size of the true set.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.
        reference_quirks: Compute what the research code computed, to compare with its figures: the hits are always
            divided by k, padding competes for places, lists without positives count as 0, ties go by position, and
            the result is a mean of batch means (so it depends on the batch size).

    Example:
        >>> metric = RecallAt(k=2, m=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    def __init__(self, k: int, m: int, positive_above: float = 0.0, *, reference_quirks: bool = False) -> None:
        super().__init__()
        self.k, self.m, self.positive_above = k, m, positive_above
        self.reference_quirks = reference_quirks

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        if self.reference_quirks:
            self.add(*reference_recall(top(scores, self.m), labels, mask, self.k, self.positive_above))
        else:
            self.add(*recall_at(scores, labels, mask, k=self.k, m=self.m, positive_above=self.positive_above))


def reference_recall(
    selected: Tensor, labels: Tensor, mask: Tensor | None, k: int, positive_above: float
) -> tuple[Tensor, Tensor]:
    """Return the research code's recall of one batch, (1,): the mean over all lists of hits / k, and that it counts."""
    true = labels > positive_above if mask is None else (labels > positive_above) & mask
    true = top(torch.where(true, labels, -1.0).to(torch.float32), k) & true
    batch_mean = (true & selected).sum(-1).double().div(k).mean()[None]
    return batch_mean, torch.ones_like(batch_mean, dtype=torch.bool)
