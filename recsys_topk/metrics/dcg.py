"""DCG at k."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from recsys_topk.metrics.functional import dcg_at
from recsys_topk.metrics.mean import ListMean
from recsys_topk.ops.dcg import Gain, check_gain


class DCGAt(ListMean):
    """DCG@k; mean over the lists with a positive. See `recsys_topk.metrics.functional.dcg_at`.

    Args:
        k: Where to cut; None = nowhere.
        gain: ``"exponential"`` (2^y - 1) or ``"linear"`` (y).
        positive_above: Only lists with a label above this are counted.

    Example:
        >>> import torch
        >>> metric = DCGAt(k=2)
        >>> metric.update(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
        >>> metric.compute()
        tensor(0.6309)
    """

    name: ClassVar[str] = "dcg"

    def __init__(self, k: int | None = None, gain: Gain = "exponential", positive_above: float = 0.0) -> None:
        super().__init__()
        self.k, self.gain, self.positive_above = k, check_gain(gain), positive_above

    @property
    def label(self) -> str:
        """See `ListMean.label`."""
        return self.name if self.k is None else f"{self.name}@{self.k}"

    def update(self, scores: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch of lists: scores, labels and mask are (B, N)."""
        self.add(*dcg_at(scores, labels, mask, k=self.k, gain=self.gain, positive_above=self.positive_above))
