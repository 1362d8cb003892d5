"""Kendall's tau between scores and labels."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import kendall_tau
from recsys_topk.metrics.mean import ListMean


class KendallTau(ListMean):
    """Kendall's tau; mean over the lists with two different labels. See `recsys_topk.metrics.functional.kendall_tau`.

    Example:
        >>> import torch
        >>> metric = KendallTau()
        >>> metric.update(torch.tensor([[3.0, 1.0, 2.0]]), torch.tensor([[2.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.3333)
    """

    name: ClassVar[str] = "kendall_tau"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*kendall_tau(scores, labels, mask))
