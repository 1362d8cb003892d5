"""Mean reciprocal rank at k."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import reciprocal_rank_at
from recsys_topk.metrics.mean import ListMean


class MRRAt(ListMean):
    """MRR@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.reciprocal_rank_at`.

    Args:
        k: Where to cut; None = nowhere.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = MRRAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "mrr"

    def __init__(self, k: int | None = None, positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.positive_above = k, positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return self.name if self.k is None else f"{self.name}@{self.k}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*reciprocal_rank_at(scores, labels, mask, k=self.k, positive_above=self.positive_above))
