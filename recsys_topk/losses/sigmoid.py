"""Sigmoid top-k BCE: cross-entropy of a logistic membership that sums to k."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.sigmoid import SigmoidTopK


class SigmoidTopKLoss(TopKLoss):
    """Cross-entropy of the logistic membership that sums to k exactly.

    p_i = sigmoid((x_i - b) / tau), b such that the membership sums to k: DFTopK with a strict threshold. Linear in N.

    Args:
        tau: Temperature.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = SigmoidTopKLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.8377)
    """

    name: ClassVar[str] = "sigmoid"
    cost: ClassVar[str] = SigmoidTopK.cost
    paper: ClassVar[str] = SigmoidTopK.paper

    def __init__(
        self,
        tau: float = 1.0,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = SigmoidTopK(tau)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
