"""Recall of the true top k among the m items with the best scores."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import recall_at
from recsys_topk.metrics.mean import ListMean


class RecallAt(ListMean):
    """recall@k@m: the share of the true top k that is among the m items with the best scores; mean over lists.

    See `recsys_topk.metrics.functional.recall_at` for the definition and the treatment of ties.

    Args:
        k: Size of the true set.
        m: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = RecallAt(k=2, m=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "recall"

    def __init__(self, k: int, m: int, positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.m, self.positive_above = k, m, positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}@{self.m}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*recall_at(scores, labels, mask, k=self.k, m=self.m, positive_above=self.positive_above))
