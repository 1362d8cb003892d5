"""Precision at k."""

from __future__ import annotations

from typing import ClassVar

from recsys_topk.metrics.at_k import MeanAtK
from recsys_topk.metrics.functional import precision_at


class PrecisionAt(MeanAtK):
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
    measure = precision_at

    def __init__(self, k: int, positive_above: float = 0.0) -> None:
        super().__init__(k, positive_above)
