"""Sparse top-k BCE: cross-entropy of an exactly sparse membership."""

from __future__ import annotations

from typing import ClassVar, Literal

from recsys_topk.losses.base import Reduction
from recsys_topk.losses.topk import TopKLoss
from recsys_topk.operators.sparse import SparseTopK


class SparseTopKLoss(TopKLoss):
    """Cross-entropy of the projection of x / tau on {0 <= p <= 1, sum p = k}.

    Memberships of exactly 0 and 1 are moved to 1e-6 and 1 - 1e-6, and pass no gradient. Linear in N.

    Args:
        tau: Regularisation (l in the paper); smaller is sparser.
        k: How many items to select; required here or in the call.
        positive_above: Items with a label above this are positive; None = as the data says, else 0.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        validate: Raise on scores that are not finite, and on NaN or negative labels and weights.

    Example:
        >>> import torch
        >>> loss = SparseTopKLoss(tau=2.0, k=2)
        >>> loss(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0, 1.0]]))
        tensor(3.8724)
    """

    name: ClassVar[str] = "sparse"
    cost: ClassVar[str] = SparseTopK.cost
    paper: ClassVar[str] = SparseTopK.paper
    clamped: ClassVar[bool] = True

    def __init__(
        self,
        tau: float = 1.0,
        *,
        k: int | Literal["positives"] | None = None,
        positive_above: float | None = None,
        reduction: Reduction = "mean",
        validate: bool = False,
    ) -> None:
        operator = SparseTopK(tau)
        super().__init__(operator, k=k, positive_above=positive_above, reduction=reduction, validate=validate)
