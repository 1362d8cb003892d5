"""SOFT top-k BCE: cross-entropy of a membership by entropic optimal transport."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.sinkhorn import SinkhornTopK


class SinkhornTopKLoss(TopKLoss):
    """Cross-entropy of the SOFT membership (entropic optimal transport onto two anchors, in closed form). Linear in N.

    Args:
        tau: The entropic regularisation epsilon.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = SinkhornTopKLoss(k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(0.6956)
    """

    name: ClassVar[str] = "sinkhorn"
    cost: ClassVar[str] = SinkhornTopK.cost
    paper: ClassVar[str] = SinkhornTopK.paper

    def __init__(
        self,
        tau: float = 1.0,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = SinkhornTopK(tau)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
