"""Precision at k."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import precision_at
from recsys_topk.metrics.mean import ListMean


class PrecisionAt(ListMean):
    """precision@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.precision_at`.

    Args:
        k: Size of the predicted set.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = PrecisionAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "precision"

    def __init__(self, k: int, positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.positive_above = k, positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*precision_at(scores, labels, mask, k=self.k, positive_above=self.positive_above))
