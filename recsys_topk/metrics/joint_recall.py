"""Recall of the true top k among the items that survive a whole cascade."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import joint_recall
from recsys_topk.metrics.mean import ListMean


class JointRecall(ListMean):
    """The share of the true top k that survives all stages with their quotas; mean over lists.

    See `recsys_topk.metrics.functional.joint_recall` for the definition and the treatment of ties.

    Args:
        k: Size of the true set.
        quotas: Number of items that each stage passes on, first stage first.
        positive_above: Items with a label above this are positive.

    Example:
        >>> import torch
        >>> metric = JointRecall(k=2, quotas=(3, 2))
        >>> stages = [torch.tensor([[4.0, 3.0, 2.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]])]
        >>> metric.update(stages, torch.tensor([[0.0, 0.0, 1.0, 1.0]]))
        >>> metric.compute()
        tensor(0.5000)
    """

    name: ClassVar[str] = "joint_recall"
    whole_cascade: ClassVar[bool] = True

    def __init__(self, k: int, quotas: Sequence[int], positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.quotas, self.positive_above = k, tuple(quotas), positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return f"{self.name}@{self.k}@{self.quotas[-1]}"

    def update(self, stage_scores: Sequence[Tensor], labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: one (B, N) tensor of scores per stage, labels and mask (B, N)."""
        above = self.positive_above
        self.add(*joint_recall(stage_scores, labels, mask, quotas=self.quotas, k=self.k, positive_above=above))
